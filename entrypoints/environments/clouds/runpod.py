"""RunPod Instant Clusters."""

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.process_view import ProcessView, Reader

HEAD = ("PRIMARY_ADDR", "MASTER_ADDR")
NODE_RANK = "NODE_RANK"
COUNT = "NUM_NODES"
MARKS = ("PRIMARY_ADDR", "RUNPOD_POD_ID")

_HINT = "an Instant Cluster sets it on every pod"


class RunPod(Environment):
    name = "runpod"
    precedence = 340
    title = "RunPod Instant Clusters"
    reads = (HEAD[0], NODE_RANK, COUNT)
    caveats = "WORLD_SIZE counts GPUs. eth0 leads to the internet; the cluster's network is ens1 and above."
    start = "container start command: LAUNCH"
    source = "https://docs.runpod.io/instant-clusters/configuration"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        reader = Reader(view.variables)
        if not any(view.variables.get(mark) for mark in MARKS) or reader.text(COUNT) is None:
            return None
        head = reader.required_host(*HEAD, hint=_HINT)
        return Allocation(
            environment=cls.name,
            job_id=f"{head}:{view.variables.get('PRIMARY_PORT', '')}",
            node_count=reader.required_number(COUNT, hint=_HINT),
            node_rank=reader.required_number(NODE_RANK, hint=_HINT),
            head=head,
            variables=reader.used,
        )
