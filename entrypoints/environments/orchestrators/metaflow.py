"""Metaflow's steps with num_parallel (@parallel), on AWS Batch and on Kubernetes."""

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.counted import counted
from entrypoints.environments.process_view import ProcessView, Reader

COUNT = "MF_PARALLEL_NUM_NODES"
NODE_RANK = "MF_PARALLEL_NODE_INDEX"
HEAD = "MF_PARALLEL_MAIN_IP"

_HINT = "Metaflow sets it in steps that are called with num_parallel"


class Metaflow(Environment):
    name = "metaflow"
    precedence = 342
    title = "Metaflow (num_parallel)"
    reads = (COUNT, NODE_RANK, HEAD)
    caveats = "With the local runner all nodes are processes of one machine, and the head is 127.0.0.1."
    start = "subprocess.run([LAUNCH]) in the step"
    source = "https://docs.metaflow.org/scaling/remote-tasks/distributed-computing"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        reader = Reader(view.variables)
        if reader.text(COUNT) is None:
            return None
        head = reader.host(HEAD)
        return counted(cls.name, view, reader, count=COUNT, rank=NODE_RANK, head=head, job_id=None, hint=_HINT)
