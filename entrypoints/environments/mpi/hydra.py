"""Hydra and MVAPICH2's launchers: four numbers and no head."""

from typing import ClassVar

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.mpi.tasks import HYDRA, MVAPICH, by_tasks
from entrypoints.environments.process_view import ProcessView, Reader


class _Numbered(Environment):
    numbers: ClassVar[tuple[str, str, str, str]]
    """The variables of rank, size, local rank and local size."""

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        if not view.variables.get(cls.numbers[0]) or not view.variables.get(cls.numbers[1]):
            return None
        return by_tasks(cls.name, view, Reader(view.variables), cls.numbers)


class Mvapich(_Numbered):
    name = "mvapich"
    precedence = 420
    title = "MVAPICH2"
    numbers = reads = MVAPICH
    caveats = "No variable names the head: set SLIPWAY_HEAD on every node."
    start = "mpirun_rsh -np 2 -hostfile HOSTS SLIPWAY_HEAD=$(head -n1 HOSTS) LAUNCH"
    source = "https://mvapich.cse.ohio-state.edu/userguide/"


class Hydra(_Numbered):
    """The mpiexec of MPICH, Intel MPI and MVAPICH 3."""

    name = "hydra"
    precedence = 440
    title = "Hydra (MPICH, Intel MPI)"
    numbers = reads = HYDRA
    caveats = "No variable names the head: set SLIPWAY_HEAD. Slurm and Flux set PMI_RANK too and take precedence."
    run_under = "MPICH 4.0"
    start = "mpiexec -ppn 1 -genv SLIPWAY_HEAD $(hostname) LAUNCH"
    source = "https://github.com/pmodels/mpich/blob/main/doc/wiki/how_to/Using_the_Hydra_Process_Manager.md"
