"""Azure Batch's multi-instance tasks.

The application command runs on the primary node only; the coordination command runs on all nodes, in the background.
"""

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.mpi.tasks import started_by_mpi
from entrypoints.environments.process_view import ProcessView, Reader, distinct, rank_of

HOSTS = "AZ_BATCH_HOST_LIST"
HEAD = "AZ_BATCH_MASTER_NODE"
IS_HEAD = "AZ_BATCH_IS_CURRENT_NODE_MASTER"
JOB = ("AZ_BATCH_JOB_ID", "AZ_BATCH_TASK_ID")

_ONE_PER_NODE = "mpirun --host $AZ_BATCH_HOST_LIST --map-by ppr:1:node launch ..."


class AzureBatch(Environment):
    name = "azure_batch"
    precedence = 305
    title = "Azure Batch (multi-instance)"
    reads = (HOSTS, HEAD, IS_HEAD, *JOB)
    caveats = "The application command is one process, on the primary node. AZ_BATCH_MASTER_NODE includes a port."
    start = "mpirun --host $AZ_BATCH_HOST_LIST --map-by ppr:1:node LAUNCH"
    source = "https://learn.microsoft.com/azure/batch/batch-compute-node-environment-variables"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        reader = Reader(view.variables)
        if view.variables.get("AZUREML_RUN_ID"):
            return None
        hosts = list(distinct(reader.hosts(HOSTS)))
        if not hosts:
            return None
        head = reader.host(HEAD) or hosts[0]
        hosts.sort(key=lambda host: host != head)  # the primary node first; the others keep their order
        is_head = (reader.text(IS_HEAD) or "").lower() == "true"
        by_mpi = started_by_mpi(view.variables)
        return Allocation(
            environment=cls.name,
            job_id=".".join(filter(None, (reader.text(name) for name in JOB))) or hosts[0],
            node_count=len(hosts),
            node_rank=0 if is_head or len(hosts) == 1 else rank_of(view, hosts, HOSTS),
            hosts=tuple(hosts),
            head=hosts[0],
            batch_script=not by_mpi,
            alone=_ONE_PER_NODE if is_head and len(hosts) > 1 and not by_mpi else "",
            variables=reader.used,
        )
