"""MVAPICH2's mpirun_rsh and mpiexec: four numbers and no head."""

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.mpi.tasks import MVAPICH, by_tasks
from entrypoints.environments.process_view import ProcessView, Reader


class Mvapich(Environment):
    name = "mvapich"
    precedence = 420
    title = "MVAPICH2"
    reads = MVAPICH
    caveats = "No variable names the head: set SLIPWAY_HEAD on every node."
    start = "mpirun_rsh -np 2 -hostfile HOSTS SLIPWAY_HEAD=$(head -n1 HOSTS) LAUNCH"
    source = "https://mvapich.cse.ohio-state.edu/userguide/"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        if not view.variables.get(MVAPICH[0]):
            return None
        return by_tasks(cls.name, view, Reader(view.variables), MVAPICH)
