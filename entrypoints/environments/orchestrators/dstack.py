"""dstack's distributed tasks."""

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.counted import counted
from entrypoints.environments.process_view import ProcessView, Reader

COUNT = "DSTACK_NODES_NUM"
NODE_RANK = "DSTACK_NODE_RANK"
HEAD = "DSTACK_MASTER_NODE_IP"
ADDRESSES = "DSTACK_NODES_IPS"
JOB = ("DSTACK_RUN_ID", "DSTACK_RUN_NAME")

_HINT = "dstack sets it in tasks; pass DSTACK_* into the container"


class Dstack(Environment):
    name = "dstack"
    precedence = 332
    title = "dstack"
    reads = (COUNT, NODE_RANK, HEAD, ADDRESSES, JOB[1])
    caveats = "One variable has one address per line. DSTACK_GPUS_NUM counts the GPUs of all nodes."
    start = "type: task, nodes: 2, image: IMAGE, commands: [LAUNCH]"
    source = "https://dstack.ai/docs/concepts/tasks/"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        reader = Reader(view.variables)
        if reader.text(COUNT) is None:
            return None
        return counted(
            cls.name, view, reader, count=COUNT, rank=NODE_RANK,
            head=reader.host(HEAD), job_id=reader.text(*JOB), hosts=reader.hosts(ADDRESSES), hint=_HINT,
        )  # fmt: skip
