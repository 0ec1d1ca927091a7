"""Hydra: the mpiexec of MPICH, Intel MPI and MVAPICH 3."""

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.mpi.tasks import HYDRA, by_tasks
from entrypoints.environments.process_view import ProcessView, Reader


class Hydra(Environment):
    name = "hydra"
    precedence = 440
    title = "Hydra (MPICH, Intel MPI)"
    reads = HYDRA
    caveats = "No variable names the head: set SLIPWAY_HEAD. Slurm and Flux set PMI_RANK too and take precedence."
    run_under = "MPICH 4.0"
    start = "mpiexec -ppn 1 -genv SLIPWAY_HEAD $(hostname) LAUNCH"
    source = "https://github.com/pmodels/mpich/blob/main/doc/wiki/how_to/Using_the_Hydra_Process_Manager.md"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        if not view.variables.get(HYDRA[0]) or not view.variables.get(HYDRA[1]):
            return None
        return by_tasks(cls.name, view, Reader(view.variables), HYDRA)
