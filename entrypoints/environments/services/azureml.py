"""Azure Machine Learning: distributions PyTorch (NODE_RANK) and MPI (Open MPI's variables)."""

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.mpi.tasks import OPEN_MPI
from entrypoints.environments.process_view import ProcessView, Reader, nodes_of_tasks

HEAD = ("AZ_BATCH_MASTER_NODE", "AZ_BATCHAI_MPI_MASTER_NODE")
COUNT = ("AZUREML_NODE_COUNT", "AZUREML_PARAMETER_NODE_COUNT")
LISTS = ("AZ_BATCH_NODE_LIST", "AZ_BATCHAI_NODE_LIST")
RUN = "AZUREML_RUN_ID"
NODE_RANK = "NODE_RANK"

_HINT = "use distribution PyTorch or MPI with process_count_per_instance 1"


class AzureMl(Environment):
    name = "azureml"
    precedence = 310
    title = "Azure Machine Learning"
    reads = (*HEAD, COUNT[0], LISTS[0], NODE_RANK, *OPEN_MPI, RUN)
    caveats = "AZ_BATCH_MASTER_NODE includes a port. On a single node the MPI master is `localhost`."
    start = "command: LAUNCH   # distribution: {type: pytorch, process_count_per_instance: 1}"
    source = "https://learn.microsoft.com/azure/machine-learning/how-to-train-distributed-gpu"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        reader = Reader(view.variables)
        head = reader.host(*HEAD) or (reader.host("MASTER_ADDR") if view.variables.get(RUN) else None)
        if head is None:
            return None
        rank = reader.number(NODE_RANK)
        count = reader.number(*COUNT)
        if rank is None and not view.variables.get(OPEN_MPI[0]) and _one_node(reader, count, head):
            count, rank = 1, 0  # a job without a distribution
        if rank is None or count is None:
            task, size, local, local_size = (reader.required_number(name, hint=_HINT) for name in OPEN_MPI)
            count, rank = nodes_of_tasks(task, size, local, local_size)
        return Allocation(
            environment=cls.name,
            job_id=reader.text(RUN) or head,
            node_count=count,
            node_rank=rank,
            head=view.hostname if head == "localhost" else head,
            variables=reader.used,
        )


def _one_node(reader: Reader, count: int | None, head: str) -> bool:
    """Whether a job without ranks has only this node."""
    listed = reader.text(*LISTS)
    return count == 1 or (
        count is None and (head == "localhost" or (listed is not None and len(listed.split(";")) == 1))
    )
