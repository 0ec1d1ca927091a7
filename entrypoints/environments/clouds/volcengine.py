"""Volcengine's (and BytePlus') machine learning platform: custom training."""

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.counted import counted
from entrypoints.environments.process_view import ProcessView, Reader
from entrypoints.errors import DetectionError

COUNT = "MLP_WORKER_NUM"
NODE_RANK = "MLP_ROLE_INDEX"
HEAD = "MLP_WORKER_0_HOST"
HOSTS = "MLP_WORKER_ALL_HOSTS"
ROLE = "MLP_ROLE"
JOB = "MLP_TASK_ID"

_HINT = "the platform sets it in custom training; pass MLP_* on"


class Volcengine(Environment):
    name = "volcengine"
    precedence = 350
    title = "Volcengine MLP"
    reads = (COUNT, NODE_RANK, HEAD, HOSTS, ROLE, JOB)
    caveats = "Only workers are nodes. MLP_WORKER_GPU counts the GPUs of one node."
    start = "command of the worker role: LAUNCH   # framework PyTorchDDP or Custom"
    source = "https://volcengine.com/docs/6459/75329"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        reader = Reader(view.variables)
        if reader.text(COUNT) is None:
            return None
        role = reader.text(ROLE) or "WORKER"
        if role.upper() != "WORKER":
            raise DetectionError(
                f"{ROLE} is {role}, but only workers are nodes", hint="start `launch` in the workers only"
            )
        return counted(
            cls.name, view, reader, count=COUNT, rank=NODE_RANK,
            head=reader.host(HEAD), job_id=reader.text(JOB), hosts=reader.hosts(HOSTS), hint=_HINT,
        )  # fmt: skip
