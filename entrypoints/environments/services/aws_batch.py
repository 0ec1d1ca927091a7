"""AWS Batch's multi-node parallel jobs.

Only the other nodes are told the main node's address. The main node may have any index; here it is node 0.
"""

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.process_view import ProcessView, Reader

COUNT = "AWS_BATCH_JOB_NUM_NODES"
INDEX = "AWS_BATCH_JOB_NODE_INDEX"
MAIN_INDEX = "AWS_BATCH_JOB_MAIN_NODE_INDEX"
HEAD = "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"
JOB = "AWS_BATCH_JOB_ID"

_HINT = "AWS Batch sets it on every node of a multi-node parallel job"


class AwsBatch(Environment):
    name = "aws_batch"
    precedence = 345
    title = "AWS Batch (multi-node parallel)"
    reads = (COUNT, INDEX, MAIN_INDEX, HEAD, JOB)
    caveats = "The main node becomes node 0, whatever its index. The jobs of an array are jobs of their own: --single."
    start = "nodeRangeProperties: [{targetNodes: '0:', container: {command: [LAUNCH]}}]"
    source = "https://docs.aws.amazon.com/batch/latest/userguide/mnp-env-vars.html"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        reader = Reader(view.variables)
        count = reader.number(COUNT)
        if count is None:
            return None
        index = reader.required_number(INDEX, hint=_HINT)
        main = reader.required_number(MAIN_INDEX, hint=_HINT)
        is_main = index == main
        head = view.hostname if is_main else reader.required_host(HEAD, hint=_HINT)
        job = reader.text(JOB) or head
        return Allocation(
            environment=cls.name,
            job_id=job.partition("#")[0],  # each node's id ends with its index
            node_count=count,
            node_rank=0 if is_main else index + (index < main),
            head=head,
            variables=reader.used,
        )
