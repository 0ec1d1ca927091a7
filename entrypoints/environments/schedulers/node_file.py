"""The common shape of batch systems: a file with the job's hosts, and one process on the first of them."""

from entrypoints.environments.base import Allocation
from entrypoints.environments.host_names import in_file
from entrypoints.environments.mpi.tasks import started_by_mpi
from entrypoints.environments.other_nodes import LIST_THEM
from entrypoints.environments.process_view import ProcessView, Reader, rank_of
from entrypoints.errors import NodesUnknownError


def by_node_file(
    environment: str, view: ProcessView, reader: Reader, *, job_id: str, path: str, start: str, started: bool = False
) -> Allocation | None:
    """The allocation from the node file in the variable `path`, which has one line per slot.

    `start` is the command that starts one task per node; `started` says that it did. Returns None for a task of an MPI
    launcher that cannot read the file, or is not in it: the launcher tells the nodes itself. For others that is a
    NodesUnknownError.
    """
    by_mpi = started_by_mpi(view.variables)
    place = reader.text(path)
    lines = view.lines(place) if place is not None else None
    if not lines:
        if by_mpi:
            return None
        if place is None:
            raise NodesUnknownError(
                f"{path} is not set", f"pass it into the container, and mount the file that it names; or {LIST_THEM}"
            )
        raise NodesUnknownError(
            f"{path} is {place}, which cannot be read here",
            f"mount it into the container, from a shared directory if it exists on the first node only; or {LIST_THEM}",
        )
    hosts = in_file(lines, path)
    if by_mpi and view.place_in(hosts) is None:
        return None
    rank = rank_of(view, hosts, path)
    return Allocation(
        environment=environment,
        job_id=job_id,
        node_count=len(hosts),
        node_rank=rank,
        hosts=hosts,
        head=hosts[0],
        batch_script=not by_mpi and not started,
        alone=start if rank == 0 and len(hosts) > 1 and not by_mpi and not started else "",
        variables=reader.used,
    )
