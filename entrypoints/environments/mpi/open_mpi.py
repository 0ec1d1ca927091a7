"""Open MPI's mpirun, version 4 (ORTE) and version 5 (PRRTE), and PRRTE alone.

OMPI_MCA_orte_hnp_uri has the launcher's addresses in version 4, PMIX_NAMESPACE its host name in version 5 (in version 4
a number). The launcher runs on the first node, unless it was called from another host.
"""

import re

from entrypoints.environments.base import Allocation, Environment, scheduler_job_id
from entrypoints.environments.explicit import NODES
from entrypoints.environments.host_names import host_name, is_loopback
from entrypoints.environments.mpi.tasks import NAMESPACE, ONE_PER_NODE, OPEN_MPI, PRRTE, URI, by_tasks
from entrypoints.environments.process_view import ProcessView, Reader

PRRTE_RANK = "PMIX_RANK"
_NAMESPACE = re.compile(r"(?:prterun|prte|mpirun|mpiexec)-(.+)-\d+@\d+")


class OpenMpi(Environment):
    name = "open_mpi"
    precedence = 400
    title = "Open MPI 4 and 5"
    reads = (*OPEN_MPI, URI, NAMESPACE)
    caveats = (
        "The launcher's first address may be unreachable, so `launch` tries all. If you call mpirun on a login node, "
        "set SLIPWAY_HEAD. mpirun passes environment variables only with -x."
    )
    run_under = "Open MPI 4.1, 5.0"
    start = "mpirun --map-by ppr:1:node -x SLIPWAY_TOKEN LAUNCH"
    source = "https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        if not view.variables.get(OPEN_MPI[0]):
            return None
        reader = Reader(view.variables)
        return by_tasks(cls.name, view, reader, OPEN_MPI, launcher(reader))


class Prrte(Environment):
    """prterun without Open MPI: a rank, but no size."""

    name = "prrte"
    precedence = 410
    title = "PRRTE"
    reads = (PRRTE, PRRTE_RANK, NAMESPACE, NODES)
    caveats = "Only PMIx knows the number of nodes: set --nodes, and start one task per node."
    run_under = "PRRTE of Open MPI 5.0"
    start = "prterun --map-by ppr:1:node -x SLIPWAY_TOKEN LAUNCH"
    source = "https://docs.prrte.org/en/latest/"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        reader = Reader(view.variables)
        if view.variables.get(OPEN_MPI[0]) or reader.text(PRRTE) is None:  # Open MPI 5 starts its tasks through PRRTE
            return None
        heads = launcher(reader)
        return Allocation(
            environment=cls.name,
            job_id=scheduler_job_id(view.variables) or cls.name,
            node_count=reader.required_number(NODES, hint=f"set --nodes, and {ONE_PER_NODE}"),
            node_rank=reader.required_number(PRRTE_RANK, hint=ONE_PER_NODE),
            head=heads[0] if heads else None,
            other_heads=heads[1:],
            variables=reader.used,
        )


def launcher(reader: Reader) -> tuple[str, ...]:
    """The launcher's names or addresses."""
    uri = reader.text(URI)
    if uri is None:
        match = _NAMESPACE.fullmatch(reader.text(NAMESPACE) or "")
        return (match[1],) if match else ()
    addresses: list[str] = []
    for interface in uri.split(";")[1:]:
        scheme, _, rest = interface.partition("://")
        if scheme in ("tcp", "tcp6"):
            words = rest.rpartition(":")[0].strip("[]").split(",")  # tcp://A,B:PORT, tcp6://[A,B]:PORT
            addresses += [host_name(word, URI) for word in words]
    return tuple(address for address in addresses if not is_loopback(address))
