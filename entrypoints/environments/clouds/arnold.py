"""ByteDance's Arnold (Merlin)."""

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.counted import counted
from entrypoints.environments.process_view import ProcessView, Reader

COUNT = "ARNOLD_WORKER_NUM"
NODE_RANK = "ARNOLD_ID"
HEAD = ("ARNOLD_WORKER_0_HOST", "METIS_WORKER_0_HOST")
HOSTS = ("ARNOLD_WORKER_HOSTS", "METIS_WORKER_HOSTS")

_HINT = "Arnold sets it in every worker"


class Arnold(Environment):
    name = "arnold"
    precedence = 360
    title = "Arnold"
    reads = (COUNT, NODE_RANK, HEAD[0], HOSTS[0])
    caveats = "The hosts have ports; IPv6 addresses are in brackets. ARNOLD_WORKER_GPU counts the GPUs of one node."
    start = "command of the workers: LAUNCH"
    source = "https://github.com/verl-project/verl-recipe/blob/main/retool/run_qwen2_7b_sft.sh"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        reader = Reader(view.variables)
        if reader.text(COUNT) is None or not any(view.variables.get(name) for name in (NODE_RANK, *HEAD, *HOSTS)):
            return None
        hosts = reader.hosts(*HOSTS)
        head = reader.host(*HEAD) or (hosts[0] if hosts else None)
        return counted(
            cls.name, view, reader, count=COUNT, rank=NODE_RANK,
            head=head, job_id=None, hosts=hosts, hint=_HINT,
        )  # fmt: skip
