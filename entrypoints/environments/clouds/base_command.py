"""NVIDIA Base Command Platform's multi-node jobs."""

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.counted import counted
from entrypoints.environments.process_view import ProcessView, Reader

COUNT = "NGC_ARRAY_SIZE"
NODE_RANK = "NGC_ARRAY_INDEX"
HEAD = "NGC_MASTER_ADDR"
JOB = "NGC_JOB_ID"

_HINT = "start one task per node with bcprun --nnodes $NGC_ARRAY_SIZE --npernode 1, and set NGC_MASTER_ADDR"


class BaseCommand(Environment):
    name = "base_command"
    precedence = 375
    title = "NVIDIA Base Command Platform"
    reads = (COUNT, NODE_RANK, HEAD, JOB)
    caveats = "NGC_GPUS_PER_NODE counts GPUs. The command of a job of type MPI runs on its first node only."
    start = 'bcprun --nnodes $NGC_ARRAY_SIZE --npernode 1 --cmd "LAUNCH"'
    source = "https://docs.nvidia.com/base-command-platform/user-guide/latest/"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        reader = Reader(view.variables)
        if reader.text(COUNT) is None:
            return None
        return counted(
            cls.name, view, reader, count=COUNT, rank=NODE_RANK,
            head=reader.host(HEAD), job_id=reader.text(JOB), hint=_HINT,
        )  # fmt: skip
