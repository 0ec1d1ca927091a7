"""PRRTE's prterun without Open MPI: a rank, but no size."""

from entrypoints.environments.base import Allocation, Environment, scheduler_job_id
from entrypoints.environments.explicit import NODES
from entrypoints.environments.mpi.open_mpi import launcher
from entrypoints.environments.mpi.tasks import NAMESPACE, ONE_PER_NODE, OPEN_MPI, PRRTE
from entrypoints.environments.process_view import ProcessView, Reader

RANK = "PMIX_RANK"


class Prrte(Environment):
    name = "prrte"
    precedence = 410
    title = "PRRTE"
    reads = (PRRTE, RANK, NAMESPACE, NODES)
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
            node_rank=reader.required_number(RANK, hint=ONE_PER_NODE),
            head=heads[0] if heads else None,
            other_heads=heads[1:],
            variables=reader.used,
        )
