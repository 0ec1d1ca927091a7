"""Slurm, from its variables alone: containers rarely have `scontrol`.

The step's variables outrank the job's, because a step may use fewer nodes. The rank is the place of SLURMD_NODENAME in
the step's list, which is sorted: SLURM_NODEID follows the components of a heterogeneous step, and SLURM_PROCID counts
tasks. Under `mpirun`, which starts its own step on all nodes but the first, only the job's list and the node's name are
right on every node.
"""

from collections.abc import Mapping

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.mpi.tasks import local_rank, started_by_mpi
from entrypoints.environments.process_view import ProcessView, Reader, distinct, rank_of
from entrypoints.errors import DetectionError
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
    def detect(cls, view: ProcessView) -> Allocation | None:
        reader = Reader(view.variables)
        job_id = reader.text(JOB_ID)
        if job_id is None:
            return None
        if restarts := reader.number(RESTARTS):
            job_id = f"{job_id}+{restarts}"  # a task left from before a requeue must not meet the new ones
        if _started_by_mpirun(view.variables):
            return _below_mpirun(view, reader, job_id)
        step_id = reader.number(STEP_ID, longest=10)
        if step_id is None or step_id >= _FIRST_SPECIAL_STEP:
            return _only_process(view, reader, job_id)
        count = reader.required_number(*NODE_COUNT, hint=_START_WITH_SRUN)
        hosts = _hosts(reader, NODE_LIST)
        job_hosts = _job_hosts(view.variables)
        several = view.variables.get(COMPONENTS)
        return Allocation(
            environment=cls.name,
            job_id=f"{job_id}.{step_id}{f'.{hosts[0]}' if several else ''}",  # components share the job's id
            node_count=count,
            node_rank=_rank(reader, hosts),
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


def _only_process(view: ProcessView, reader: Reader, job_id: str) -> Allocation:
    """The allocation of a batch script or of salloc's shell: the job's only process so far.

    It runs on the first node. Without use_interactive_step salloc's shell stays on the host where the user called it.
    """
    components = reader.number(COMPONENTS) or 0
    if components:
        lists = [_hosts(reader, (COMPONENT_LIST.format(component),)) for component in range(components)]
        hosts = distinct([host for listed in lists for host in listed])
        count, everywhere = len(hosts), f"--het-group=0-{components - 1}"
    else:
        count = reader.required_number(*NODE_COUNT[1:], hint=_START_WITH_SRUN)
        hosts, everywhere = _hosts(reader, NODE_LIST[1:]), f"--nodes={count}"
    return Allocation(
        environment=Slurm.name,
        job_id=job_id,
        node_count=count,
        node_rank=reader.number(NODE_RANK) or 0,
        hosts=hosts,
        head=hosts[0],
        alone=f"srun {everywhere} --ntasks-per-node=1 launch ..." if count > 1 or _is_elsewhere(view, hosts) else "",
        variables=reader.used,
    )


def _is_elsewhere(view: ProcessView, hosts: tuple[str, ...]) -> bool:
    """Whether this process runs on none of the job's hosts: slurmd did not start it, and the name is no host's.

    The name alone does not tell, because a container may have one of its own.
    """
    by_slurmd = any(view.variables.get(name) for name in (NODE_NAME, NODE_RANK))
    return not by_slurmd and not any(map(view.is_me, hosts))


def _rank(reader: Reader, hosts: tuple[str, ...]) -> int:
    """This node's rank in the step: by its name, else by SLURM_NODEID."""
    name = reader.text(NODE_NAME)
    if name in hosts:
        return hosts.index(name)
    return reader.required_number(NODE_RANK, hint=_START_WITH_SRUN)


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


def _below_mpirun(view: ProcessView, reader: Reader, job_id: str) -> Allocation:
    hosts = _hosts(reader, NODE_LIST[1:])
    name = reader.text(NODE_NAME) or view.hostname
    return Allocation(
        environment=Slurm.name,
        job_id=job_id,
        node_count=len(hosts),
        node_rank=rank_of(ProcessView(variables={}, hostname=name, root=view.root), hosts, NODE_LIST[1]),
        local_rank=local_rank(reader),
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
