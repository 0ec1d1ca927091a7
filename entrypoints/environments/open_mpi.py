"""Open MPI's mpirun: version 4 (ORTE) and version 5 (PRRTE).

Version 4 tells the launcher's addresses in OMPI_MCA_orte_hnp_uri. Version 5 tells its host name in PMIX_NAMESPACE,
which version 4 has too, as a number. The launcher runs on the first node unless it was called from elsewhere.
"""

import re

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.mpi import by_tasks
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
    beware = (
        "The launcher's first address may be unroutable, so all are tried. Called from a login node, mpirun is not on "
        "the first node: set SLIPWAY_HEAD. Environment variables travel only with -x."
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
    """The launcher's names or addresses, and an id of this run."""
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
