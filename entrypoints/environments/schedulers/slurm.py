"""Slurm, from its variables alone: containers rarely have `scontrol`.

The step's variables outrank the job's, because a step may use fewer nodes. The rank is SLURM_NODEID; SLURM_PROCID
counts tasks, and several may share a node. Under `mpirun`, which starts its own step on all nodes but the first, only
the job's list and the node's name are right on every node.
"""

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.mpi.tasks import local_rank, started_by_mpi
from entrypoints.environments.process_view import ProcessView, Reader, rank_of
from entrypoints.errors import DetectionError
from entrypoints.hostlist import HostlistError, expand

JOB_ID = "SLURM_JOB_ID"
STEP_ID = "SLURM_STEP_ID"
NODE_COUNT = ("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES")
NODE_LIST = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
TASK_COUNT = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
NODE_RANK = "SLURM_NODEID"
LOCAL_RANK = "SLURM_LOCALID"
NODE_NAME = "SLURMD_NODENAME"
RESTARTS = "SLURM_RESTART_COUNT"

_START_WITH_SRUN = "start one task per node with srun --ntasks-per-node=1, and pass SLURM_* into the container"


class Slurm(Environment):
    name = "slurm"
    precedence = 200
    job_id_variable = JOB_ID
    title = "Slurm"
    reads = (JOB_ID, STEP_ID, *NODE_COUNT[:2], *NODE_LIST[:2], NODE_RANK, LOCAL_RANK, NODE_NAME, RESTARTS)
    caveats = (
        "SLURM_PROCID and SLURM_NTASKS count tasks. enroot and pyxis also set MASTER_ADDR, RANK and WORLD_SIZE; Slurm "
        "takes precedence. Without srun, an sbatch script is one process on the first node."
    )
    run_under = "Slurm 22.05"
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
        if started_by_mpi(view.variables):
            return _below_mpirun(view, reader, job_id)
        count = reader.required_number(*NODE_COUNT, hint=_START_WITH_SRUN)
        hosts = _hosts(reader, NODE_LIST)
        step_id = reader.text(STEP_ID)
        if step_id is None:  # a batch script or salloc's shell: the job's only process
            rank = reader.number(NODE_RANK) or 0
            alone = f"srun --nodes={count} --ntasks-per-node=1 launch ..." if count > 1 else ""
        else:
            rank, alone = reader.required_number(NODE_RANK, hint=_START_WITH_SRUN), ""
            job_id = f"{job_id}.{step_id}"
        return Allocation(
            environment=cls.name,
            job_id=job_id,
            node_count=count,
            node_rank=rank,
            local_rank=0 if step_id is None else reader.required_number(LOCAL_RANK, hint=_START_WITH_SRUN),
            task_count=None if step_id is None else reader.number(*TASK_COUNT),
            hosts=hosts,
            head=hosts[0],
            alone=alone,
            variables=reader.used,
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
