"""Kubeflow's MPIJob: mpirun runs in a launcher pod, the tasks in workers `<job>-worker-<index>`.

The tasks see Open MPI's variables, whose addresses are the launcher's. It is no node, unless the job has
runLauncherAsWorker: then its task is the first one.
"""

import re

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.kubernetes.indexed_job import pod_name
from entrypoints.environments.mpi.hydra import NUMBERS as HYDRA
from entrypoints.environments.mpi.open_mpi import NUMBERS as OPEN_MPI
from entrypoints.environments.mpi.tasks import by_tasks
from entrypoints.environments.process_view import ProcessView, Reader

HOST_FILE = "/etc/mpi/hostfile"
MARKS = (
    *("OMPI_MCA_orte_default_hostfile", "PRTE_MCA_prte_default_hostfile"),
    *("I_MPI_HYDRA_HOST_FILE", "HYDRA_HOST_FILE"),
)
ROLE = "K_MPI_JOB_ROLE"

_POD = re.compile(r"(.+)-(?:worker-(\d+)|launcher(?:-\w+)?)")


class MpiJob(Environment):
    name = "mpi_job"
    precedence = 395
    title = "Kubeflow MPIJob"
    reads = (MARKS[0], ROLE, *OPEN_MPI, *HYDRA, "host name", "/etc/hosts")
    caveats = "The head is the first worker, not the launcher; with runLauncherAsWorker it is the launcher."
    start = "command of the launcher: mpirun --map-by ppr:1:node -x SLIPWAY_TOKEN LAUNCH"
    source = "https://www.kubeflow.org/docs/components/trainer/legacy-v1/user-guides/mpi/"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        reader = Reader(view.variables)
        numbers = next((names for names in (OPEN_MPI, HYDRA) if view.variables.get(names[0])), None)
        mark = view.variables.get(ROLE) or any(view.variables.get(name) == HOST_FILE for name in MARKS)
        match = _POD.fullmatch(view.hostname.split(".")[0])
        if numbers is None or not mark or match is None:
            return None
        _, subdomain = pod_name(view, reader)
        suffix = f".{subdomain}" if subdomain else ""
        found = by_tasks(cls.name, view, reader, numbers, (f"{match[1]}-worker-0{suffix}",), match[1])
        launcher_works = found.node_rank == (0 if match[2] is None else int(match[2]) + 1)
        if not launcher_works:
            return found
        return by_tasks(cls.name, view, reader, numbers, (f"{match[1]}-launcher{suffix}",), match[1])
