"""Slurm, from its variables alone: containers rarely have `scontrol`.

The step's variables outrank the job's, because a step may use fewer nodes. The rank is the place of this host's name,
else of SLURMD_NODENAME, in the step's list, which is sorted: SLURM_NODEID follows the components of a heterogeneous
step, and SLURM_PROCID counts tasks. Under `mpirun` only the job's list is right on every node: it starts its own step
on all nodes but the first, or passes on the variables of the batch script by ssh.
"""

from collections.abc import Mapping

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.mpi.tasks import node_rank, started_by_mpi
from entrypoints.environments.process_view import ProcessView, Reader, distinct
from entrypoints.errors import DetectionError, NodesUnknownError
from entrypoints.hostlist import HostlistError, compress, expand

JOB_ID = "SLURM_JOB_ID"
STEP_ID = "SLURM_STEP_ID"
NODE_COUNT = ("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES")
NODE_LIST = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
TASK_COUNT = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
NODE_RANK = "SLURM_NODEID"
LOCAL_RANK = "SLURM_LOCALID"
NODE_NAME = "SLURMD_NODENAME"
RESTARTS = "SLURM_RESTART_COUNT"
COMPONENTS = "SLURM_HET_SIZE"
COMPONENT_LIST = "SLURM_JOB_NODELIST_HET_GROUP_{}"

_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Step ids from here on are Slurm's own: 4294967290 is salloc's shell on the first node, 4294967291 a batch script."""
_START_WITH_SRUN = "start one task per node with srun --ntasks-per-node=1, and pass SLURM_* into the container"


class Slurm(Environment):
    name = "slurm"
    precedence = 200
    job_id_variable = JOB_ID
    title = "Slurm"
    reads = (JOB_ID, STEP_ID, *NODE_COUNT[:2], *NODE_LIST[:2], NODE_NAME, NODE_RANK, LOCAL_RANK, RESTARTS, COMPONENTS)
    caveats = (
        "SLURM_PROCID and SLURM_NTASKS count tasks. enroot and pyxis also set MASTER_ADDR, RANK and WORLD_SIZE, Cray's "
        "Slurm PALS_RANKID; Slurm takes precedence. Without srun, an sbatch script and the shell of salloc are one "
        "process, on the first node or on the login node. A step with fewer nodes than the job gets a warning."
    )
    run_under = "Slurm 22.05, 24.11"
    start = "srun --ntasks-per-node=1 LAUNCH"
    source = "https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES"

    @classmethod
    def scheduler_job_id(cls, variables: Mapping[str, str]) -> str | None:
        """The job's id with the number of its restarts: a task of an earlier start must not meet the new ones."""
        job_id = super().scheduler_job_id(variables)
        restarts = variables.get(RESTARTS, "").lstrip("0")
        return f"{job_id}+{restarts}" if job_id and restarts.isdigit() else job_id

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        reader = Reader(view.variables)
        job_id = cls.scheduler_job_id(view.variables)
        if job_id is None:
            return None
        reader.text(JOB_ID)
        reader.number(RESTARTS)
        if _started_by_mpirun(view.variables):
            return _below_mpirun(view, reader, job_id)
        if not _in_a_step(reader):
            return _only_process(view, reader, job_id)
        count = reader.required_number(*NODE_COUNT, hint=_START_WITH_SRUN)
        hosts = _hosts(reader, NODE_LIST)
        job_hosts = _job_hosts(view.variables)
        part = f".{hosts[0]}" if view.variables.get(COMPONENTS) else ""  # components share the job's id
        rank = _place(view, reader, hosts)
        if rank is None:
            raise DetectionError(f"{NODE_RANK} is not set", hint=_START_WITH_SRUN)
        return Allocation(
            environment=cls.name,
            job_id=f"{job_id}.{reader.text(STEP_ID)}{part}",
            node_count=count,
            node_rank=rank,
            local_rank=reader.required_number(LOCAL_RANK, hint=_START_WITH_SRUN),
            task_count=reader.number(*TASK_COUNT),
            hosts=hosts,
            head=hosts[0],
            warnings=(_too_few(count, job_hosts),) if count < len(job_hosts) else (),
            variables=reader.used,
        )


def _started_by_mpirun(variables: Mapping[str, str]) -> bool:
    """Whether mpirun started this task. PALS_RANKID does not tell: Slurm sets it too on HPE Cray systems."""
    return started_by_mpi({name: value for name, value in variables.items() if name != "PALS_RANKID"})


def _in_a_step(reader: Reader) -> bool:
    """Whether `srun` started this process, or a daemon above it."""
    step_id = reader.number(STEP_ID, longest=10)
    return step_id is not None and step_id < _FIRST_SPECIAL_STEP


def _only_process(view: ProcessView, reader: Reader, job_id: str) -> Allocation:
    """The allocation of a batch script or of salloc's shell: the job's only process so far.

    It runs on the first node. Without use_interactive_step salloc's shell stays on the host where the user called it.
    Raises NodesUnknownError if nothing lists the nodes.
    """
    components = reader.number(COMPONENTS) or 0
    names: list[tuple[str, ...]] = [(COMPONENT_LIST.format(component),) for component in range(components)] or [
        NODE_LIST[1:]
    ]
    if not any(reader.text(*alternatives) for alternatives in names):
        raise NodesUnknownError(f"{' and '.join(names[0])} are not set", hint=_START_WITH_SRUN)
    hosts = distinct([host for alternatives in names for host in _hosts(reader, alternatives)])
    several = f"--het-group=0-{components - 1}" if components else f"--nodes={len(hosts)}"
    rank = _place(view, reader, hosts)
    return Allocation(
        environment=Slurm.name,
        job_id=job_id,
        node_count=(None if components else reader.number(NODE_COUNT[1])) or len(hosts),
        node_rank=rank or 0,
        hosts=hosts,
        head=hosts[0],
        batch_script=True,
        alone=f"srun {several} --ntasks-per-node=1 launch ..." if len(hosts) > 1 or _is_elsewhere(view, hosts) else "",
        variables=reader.used,
    )


def _is_elsewhere(view: ProcessView, hosts: tuple[str, ...]) -> bool:
    """Whether this process runs on none of the job's hosts: slurmd did not start it, and the name is no host's.

    The name alone does not tell, because a container may have one of its own.
    """
    by_slurmd = any(view.variables.get(name) for name in (NODE_NAME, NODE_RANK))
    return not by_slurmd and not any(map(view.is_me, hosts))


def _place(view: ProcessView, reader: Reader, hosts: tuple[str, ...]) -> int | None:
    """This node's rank among the hosts: by its own name, else by the name or the number that slurmd gave it."""
    rank = view.place_in(hosts)
    if rank is None:
        name = reader.text(NODE_NAME)
        rank = hosts.index(name) if name in hosts else reader.number(NODE_RANK)
    return rank


def _job_hosts(variables: Mapping[str, str]) -> tuple[str, ...]:
    """The hosts of the job around a step; empty if its variables do not tell them."""
    components = Reader(variables).number(COMPONENTS) or 0
    names = [COMPONENT_LIST.format(component) for component in range(components)] or [NODE_LIST[1]]
    try:
        return distinct([host for name in names if (text := variables.get(name)) for host in expand(text)])
    except HostlistError:
        return ()


def _too_few(count: int, job_hosts: tuple[str, ...]) -> str:
    return (
        f"this step has {count} of the job's {len(job_hosts)} nodes ({compress(job_hosts)}); "
        f"for all of them write srun --nodes={len(job_hosts)} --ntasks-per-node=1 launch ..."
    )


def _below_mpirun(view: ProcessView, reader: Reader, job_id: str) -> Allocation | None:
    """The allocation of a task of `mpirun`; None if only the launcher knows its place.

    Slurm's name of the node counts only in a step of this job: otherwise it may be the batch script's.
    """
    hosts = _hosts(reader, NODE_LIST[1:])
    rank = view.place_in(hosts)
    if rank is None and _in_a_step(reader) and (name := reader.text(NODE_NAME)) in hosts:
        rank = hosts.index(name)
    if rank is None:
        rank = node_rank(view.variables, len(hosts))
    if rank is None:
        return None
    return Allocation(
        environment=Slurm.name,
        job_id=job_id,
        node_count=len(hosts),
        node_rank=rank,
        hosts=hosts,
        head=hosts[0],
        variables=reader.used,
    )


def _hosts(reader: Reader, names: tuple[str, ...]) -> tuple[str, ...]:
    text = reader.required(*names, hint=_START_WITH_SRUN)
    try:
        return tuple(expand(text))
    except HostlistError as error:
        name = next(name for name in names if name in reader.used)
        raise DetectionError(f"{name} is {text!r}: {error}") from error
