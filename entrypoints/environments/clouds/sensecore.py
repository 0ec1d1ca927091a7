"""SenseCore's training jobs (PyTorch)."""

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.counted import counted
from entrypoints.environments.process_view import ProcessView, Reader

COUNT = "SENSECORE_PYTORCH_NNODES"
NODE_RANK = "SENSECORE_PYTORCH_NODE_RANK"
HEAD = "MASTER_ADDR"

_HINT = "SenseCore sets it in PyTorch jobs"


class SenseCore(Environment):
    name = "sensecore"
    precedence = 365
    title = "SenseCore"
    reads = (COUNT, NODE_RANK, HEAD)
    caveats = "SENSECORE_ACCELERATE_DEVICE_COUNT counts the devices of one node."
    start = "command of the job: LAUNCH"
    source = "https://www.sensecore.cn"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        reader = Reader(view.variables)
        if reader.text(COUNT) is None:
            return None
        head = reader.host(HEAD)
        return counted(cls.name, view, reader, count=COUNT, rank=NODE_RANK, head=head, job_id=None, hint=_HINT)
