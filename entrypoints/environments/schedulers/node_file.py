"""The common shape of batch systems: a file with the job's hosts, and one process on the first of them."""

from entrypoints.environments.base import Allocation
from entrypoints.environments.mpi.tasks import local_rank, run_id, started_by_mpi
from entrypoints.environments.process_view import ProcessView, Reader, distinct, rank_of
from entrypoints.errors import DetectionError


def by_node_file(
    environment: str, view: ProcessView, reader: Reader, *, job_id: str, path: str, start: str, started: bool = False
) -> Allocation | None:
    """The allocation from the node file in the variable `path`, which has one line per slot.

    `start` is the command that starts one task per node; `started` says that it did. Returns None if a task of an MPI
    launcher cannot read the file, as the launcher tells the nodes itself. For others that is a DetectionError. Below
    Open MPI the run's id takes the place of `job_id`, which tasks on other nodes may not know.
    """
    by_mpi = started_by_mpi(view.variables)
    place = reader.text(path)
    lines = view.lines(place) if place is not None else None
    if not lines:
        if by_mpi:
            return None
        place = reader.required(path, hint="pass the scheduler's variables into the container")
        raise DetectionError(
            f"{path} is {place}, which cannot be read here",
            hint="mount it into the container, from a shared directory if it exists on the first node only",
        )
    hosts = distinct([line.split()[0] for line in lines])
    rank = rank_of(view, hosts, path)
    return Allocation(
        environment=environment,
        job_id=run_id(view.variables) or job_id,
        node_count=len(hosts),
        node_rank=rank,
        local_rank=local_rank(reader),
        hosts=hosts,
        head=hosts[0],
        alone=start if rank == 0 and len(hosts) > 1 and not by_mpi and not started else "",
        variables=reader.used,
    )
