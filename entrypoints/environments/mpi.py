"""What the MPI launchers have in common, also for the schedulers above them."""

from collections.abc import Mapping

from entrypoints.environments.base import Allocation
from entrypoints.environments.process_view import ProcessView, Reader, nodes_of_tasks
from entrypoints.errors import DetectionError

STARTED = ("OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PALS_RANKID", "MPI_LOCALNRANKS", "MPI_LOCALRANKID")
"""Variables of which at least one is there in every task that an MPI launcher started. PMI_RANK is not among them:
schedulers set it too, for tasks that they start themselves."""
LOCAL_RANK = (
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "PALS_LOCAL_RANKID",
    "MPI_LOCALRANKID",
)
_JOB_ID = ("SLIPWAY_JOB_ID", "SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID", "FLUX_JOB_ID")
_ARRAY_INDEX = {"LSB_JOBID": "LSB_JOBINDEX", "JOB_ID": "SGE_TASK_ID"}
_OF_GRID_ENGINE = ("PE_HOSTFILE", "PE", "SGE_TASK_ID")
"""JOB_ID alone is anybody's."""
ONE_PER_NODE = "start one task per node: mpirun --map-by ppr:1:node, mpiexec -ppn 1"


def started_by_mpi(variables: Mapping[str, str]) -> bool:
    """Whether an MPI launcher started this task."""
    return any(variables.get(name) for name in STARTED)


def local_rank(reader: Reader) -> int:
    """This task's rank on its node, by whichever MPI launcher started it; 0 without one."""
    return reader.number(*LOCAL_RANK) or 0


def scheduler_job_id(variables: Mapping[str, str]) -> str | None:
    """The id of the scheduler's job around this one: equal on all nodes, though the launchers' own ids may differ."""
    names = [name for name in _JOB_ID if variables.get(name)]
    if variables.get("JOB_ID") and any(variables.get(name) for name in _OF_GRID_ENGINE):
        names.append("JOB_ID")
    return array_job_id(variables, names[0]) if names else None


def array_job_id(variables: Mapping[str, str], name: str) -> str:
    """The job id in this variable, with the index in an array: its elements share the id and run side by side."""
    index = variables.get(_ARRAY_INDEX.get(name, ""), "")
    return f"{variables[name]}.{index}" if index.isdigit() and index != "0" else variables[name]


def by_tasks(
    environment: str,
    view: ProcessView,
    reader: Reader,
    names: tuple[str, str, str, str],
    heads: tuple[str, ...],
    job_id: str,
) -> Allocation:
    """What an MPI launcher's four numbers say: rank, size, local rank and local size.

    `heads` are the names or addresses of the first node, as far as the launcher tells.
    """
    task, size, local = (reader.required_number(name, hint=ONE_PER_NODE) for name in names[:3])
    local_size = reader.number(names[3])
    if local_size is None:
        if local > 0:
            raise DetectionError(f"{names[3]} is not set for task {task}, the node's {local + 1}.", hint=ONE_PER_NODE)
        local_size = 1
    count, rank = nodes_of_tasks(task, size, local, local_size)
    if not heads and count == 1:
        heads = (view.hostname,)
    return Allocation(
        environment=environment,
        job_id=scheduler_job_id(view.variables) or job_id,
        node_count=count,
        node_rank=rank,
        local_rank=local,
        task_count=size,
        head=heads[0] if heads else None,
        other_heads=heads[1:],
        variables=reader.used,
    )
