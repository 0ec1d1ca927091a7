"""Variables and rules that the MPI launchers share."""

import contextlib
from collections.abc import Mapping

from entrypoints.environments.base import Allocation, scheduler_job_id
from entrypoints.environments.host_names import in_file
from entrypoints.environments.process_view import ProcessView, Reader, nodes_of_tasks
from entrypoints.errors import DetectionError
from entrypoints.hostlist import compress

URI = "OMPI_MCA_orte_hnp_uri"
NAMESPACE = "PMIX_NAMESPACE"
PRRTE = "PRTE_LAUNCHED"
OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
MVAPICH = ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE")
HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
"""Each launcher's rank, size, local rank and local size."""
HOST_FILES = (
    *("OMPI_MCA_orte_default_hostfile", "PRTE_MCA_prte_default_hostfile"),
    *("I_MPI_HYDRA_HOST_FILE", "HYDRA_HOST_FILE"),
)
"""Variables that name the launcher's host file."""
_VOLCANO = "etc/volcano"
"""Volcano lists the pods of each kind of task there; its plug-in mpi starts mpirun in a pod of another kind."""
STARTED = (OPEN_MPI[0], MVAPICH[0], "PALS_RANKID", "MPI_LOCALNRANKS", "MPI_LOCALRANKID", PRRTE)
"""Every task of an MPI launcher has at least one of these variables. PMI_RANK is not among them, because schedulers set
it for their own tasks too."""
LOCAL_RANK = (OPEN_MPI[2], MVAPICH[2], "PALS_LOCAL_RANKID", HYDRA[2])
ONE_PER_NODE = "start one task per node: mpirun --map-by ppr:1:node, mpiexec -ppn 1"


def started_by_mpi(variables: Mapping[str, str]) -> bool:
    """Whether an MPI launcher started this task."""
    return any(variables.get(name) for name in STARTED)


def run_id(variables: Mapping[str, str]) -> str | None:
    """The id that Open MPI or PRRTE gave to this run; None below other launchers, which give none.

    It is equal on all nodes of the run. A scheduler's variables often are on the first node only, because these
    launchers start the other nodes by ssh.
    """
    if not (variables.get(OPEN_MPI[0]) or variables.get(PRRTE)):
        return None
    return variables.get(URI, "").partition(";")[0] or variables.get(NAMESPACE) or None


def node_rank(variables: Mapping[str, str], node_count: int) -> int | None:
    """This node's rank according to its MPI launcher; None if its numbers do not tell it, or count other nodes."""
    for names in (OPEN_MPI, MVAPICH, HYDRA):
        reader = Reader(variables)
        with contextlib.suppress(DetectionError):
            task, size, local, local_size = (reader.required_number(name, hint=ONE_PER_NODE) for name in names)
            count, rank = nodes_of_tasks(task, size, local, local_size)
            return rank if count == node_count else None
    return None


def by_tasks(
    environment: str,
    view: ProcessView,
    reader: Reader,
    names: tuple[str, str, str, str],
    launcher: tuple[str, ...] = (),
) -> Allocation:
    """The allocation from an MPI launcher's four numbers: rank, size, local rank and local size.

    `launcher` are its names or addresses. It runs on the first node, unless it was called from a host that is no node.
    A list of the hosts tells the first one for certain.
    """
    task, size, local = (reader.required_number(name, hint=ONE_PER_NODE) for name in names[:3])
    local_size = reader.number(names[3])
    if local_size is None:
        if local > 0:
            raise DetectionError(f"{names[3]} is not set for task {task}, the node's {local + 1}.", hint=ONE_PER_NODE)
        local_size = 1
    count, rank = nodes_of_tasks(task, size, local, local_size)
    hosts = _listed(view, reader, count, rank)
    heads = (view.hostname,) if count == 1 else hosts[:1] if hosts else launcher
    return Allocation(
        environment=environment,
        job_id=scheduler_job_id(view.variables) or environment,
        node_count=count,
        node_rank=rank,
        local_rank=local,
        task_count=size,
        hosts=hosts,
        head=heads[0] if heads else None,
        other_heads=tuple(heads[1:]),
        variables=reader.used,
    )


def _listed(view: ProcessView, reader: Reader, count: int, rank: int) -> tuple[str, ...] | None:
    """The hosts of the run, from a file here that lists as many as there are nodes, with this one at its rank."""
    named = {path: name for name in HOST_FILES if (path := view.variables.get(name))}
    try:
        pods = sorted(path.name for path in view.place(f"/{_VOLCANO}").iterdir() if path.suffix == ".host")
    except OSError:
        pods = []
    for path in (*named, *(f"/{_VOLCANO}/{name}" for name in pods)):
        hosts = in_file(view.lines(path) or [], path)
        if len(hosts) == count and view.place_in(hosts) == rank:
            reader.used[named.get(path, path)] = path if path in named else compress(hosts)
            return hosts
    return None
