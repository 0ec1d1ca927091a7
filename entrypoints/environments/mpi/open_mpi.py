"""Open MPI's mpirun: version 4 (ORTE) and version 5 (PRRTE).

OMPI_MCA_orte_hnp_uri has the launcher's addresses in version 4, PMIX_NAMESPACE its host name in version 5 (in version 4
a number). The launcher runs on the first node, unless it was called from another host.
"""

import re

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.mpi.tasks import by_tasks
from entrypoints.environments.process_view import ProcessView, Reader

NUMBERS = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
URI = "OMPI_MCA_orte_hnp_uri"
NAMESPACE = "PMIX_NAMESPACE"

_NAMESPACE = re.compile(r"(?:prterun|prte|mpirun|mpiexec)-(.+)-\d+@\d+")


class OpenMpi(Environment):
    name = "open_mpi"
    precedence = 400
    title = "Open MPI 4 and 5"
    reads = (*NUMBERS, URI, NAMESPACE)
    caveats = (
        "The launcher's first address may be unreachable, so `launch` tries all. If you call mpirun on a login node, "
        "set SLIPWAY_HEAD. mpirun passes environment variables only with -x."
    )
    run_under = "Open MPI 4.1"
    start = "mpirun --map-by ppr:1:node -x SLIPWAY_TOKEN LAUNCH"
    source = "https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        if not view.variables.get(NUMBERS[0]):
            return None
        reader = Reader(view.variables)
        heads, job_id = launcher(reader)
        return by_tasks(cls.name, view, reader, NUMBERS, heads, job_id)


def launcher(reader: Reader) -> tuple[tuple[str, ...], str]:
    """The launcher's names or addresses, and an id of the run."""
    uri = reader.text(URI)
    if uri is None:
        namespace = reader.text(NAMESPACE) or ""
        match = _NAMESPACE.fullmatch(namespace)
        return ((match[1],) if match else ()), namespace or "mpirun"
    job, *interfaces = uri.split(";")
    addresses: list[str] = []
    for interface in interfaces:
        scheme, _, rest = interface.partition("://")
        if scheme == "tcp":
            addresses += rest.rpartition(":")[0].split(",")
    return tuple(address for address in addresses if not address.startswith("127.")), job
