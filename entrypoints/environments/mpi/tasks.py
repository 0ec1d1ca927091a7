"""Variables and rules that the MPI launchers share."""

from collections.abc import Mapping

from entrypoints.environments.base import Allocation, scheduler_job_id
from entrypoints.environments.process_view import ProcessView, Reader, nodes_of_tasks
from entrypoints.errors import DetectionError

URI = "OMPI_MCA_orte_hnp_uri"
NAMESPACE = "PMIX_NAMESPACE"
PRRTE = "PRTE_LAUNCHED"
STARTED = ("OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PALS_RANKID", "MPI_LOCALNRANKS", "MPI_LOCALRANKID", PRRTE)
"""Every task of an MPI launcher has at least one of these variables. PMI_RANK is not among them, because schedulers set
it for their own tasks too."""
LOCAL_RANK = (
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "PALS_LOCAL_RANKID",
    "MPI_LOCALRANKID",
)
ONE_PER_NODE = "start one task per node: mpirun --map-by ppr:1:node, mpiexec -ppn 1"


def started_by_mpi(variables: Mapping[str, str]) -> bool:
    """Whether an MPI launcher started this task."""
    return any(variables.get(name) for name in STARTED)


def run_id(variables: Mapping[str, str]) -> str | None:
    """The id that Open MPI or PRRTE gave to this run; None below other launchers, which give none.

    It is equal on all nodes of the run. A scheduler's variables often are on the first node only, because these
    launchers start the other nodes by ssh.
    """
    if not (variables.get("OMPI_COMM_WORLD_RANK") or variables.get(PRRTE)):
        return None
    return variables.get(URI, "").partition(";")[0] or variables.get(NAMESPACE) or None


def local_rank(reader: Reader) -> int:
    """This task's rank on its node according to its MPI launcher; 0 without one."""
    return reader.number(*LOCAL_RANK) or 0


def by_tasks(
    environment: str,
    view: ProcessView,
    reader: Reader,
    names: tuple[str, str, str, str],
    heads: tuple[str, ...],
    name_of_run: str = "",
) -> Allocation:
    """The allocation from an MPI launcher's four numbers: rank, size, local rank and local size.

    `heads` are the names or addresses of the first node that the launcher tells. `name_of_run` is the job's id if
    the host's name tells it.
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
        job_id=name_of_run or run_id(view.variables) or scheduler_job_id(view.variables) or environment,
        node_count=count,
        node_rank=rank,
        local_rank=local,
        task_count=size,
        head=heads[0] if heads else None,
        other_heads=heads[1:],
        variables=reader.used,
    )
