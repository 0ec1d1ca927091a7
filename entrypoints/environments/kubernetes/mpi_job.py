"""Kubeflow's MPIJob, and the MPI runtime of its Trainer v2: mpirun runs in a launcher pod, the tasks in others.

The others are `<job>-worker-<index>` of an MPIJob, `<job>-node-0-<index>` of Trainer v2. The tasks see Open MPI's
variables, whose addresses are the launcher's. It is no node, unless the job has runLauncherAsWorker (Trainer v2:
runLauncherAsNode): then its task is the first one.
"""

import re
from dataclasses import replace

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.kubernetes.indexed_job import pod_name
from entrypoints.environments.mpi.tasks import HOST_FILES, HYDRA, OPEN_MPI, by_tasks
from entrypoints.environments.process_view import ProcessView, Reader

HOST_FILE = "/etc/mpi/hostfile"
ROLE = "K_MPI_JOB_ROLE"

_POD = re.compile(r"(?P<job>.+)-(?:(?P<kind>worker|node-0)-(?P<index>\d+)|(?P<launcher>launcher(?:-\w+)*))")
_FIRST_LAUNCHER = {"worker": "launcher", "node-0": "launcher-0-0"}


class MpiJob(Environment):
    name = "mpi_job"
    precedence = 395
    title = "Kubeflow MPIJob, Trainer v2 with MPI"
    reads = (HOST_FILES[0], ROLE, *OPEN_MPI, *HYDRA, "host name", "/etc/hosts")
    caveats = (
        "The head is the first worker, not the launcher; with runLauncherAsWorker (Trainer v2: runLauncherAsNode) it "
        "is the launcher."
    )
    start = "command of the launcher: mpirun --map-by ppr:1:node -x SLIPWAY_TOKEN LAUNCH"
    source = "https://www.kubeflow.org/docs/components/trainer/legacy-v1/user-guides/mpi/"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        reader = Reader(view.variables)
        numbers = next((names for names in (OPEN_MPI, HYDRA) if view.variables.get(names[0])), None)
        mark = view.variables.get(ROLE) or any(view.variables.get(name) == HOST_FILE for name in HOST_FILES)
        match = _POD.fullmatch(view.hostname.split(".")[0])
        if numbers is None or not mark or match is None:
            return None
        allocation = by_tasks(cls.name, view, reader, numbers)
        if match["launcher"]:
            head = match["launcher"]
        elif allocation.node_rank == int(match["index"]) + 1:
            head = _FIRST_LAUNCHER[match["kind"]]
        else:
            head = f"{match['kind']}-0"
        _, subdomain = pod_name(view, reader)
        return replace(
            allocation, job_id=match["job"], head=f"{match['job']}-{head}{f'.{subdomain}' if subdomain else ''}"
        )
