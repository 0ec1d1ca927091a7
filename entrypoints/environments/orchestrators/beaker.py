"""Beaker of the Allen Institute for AI: the replicas of a task with leader selection."""

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.counted import counted
from entrypoints.environments.process_view import ProcessView, Reader

COUNT = "BEAKER_REPLICA_COUNT"
NODE_RANK = "BEAKER_REPLICA_RANK"
HEAD = "BEAKER_LEADER_REPLICA_HOSTNAME"
JOB = "BEAKER_WORKLOAD_ID"

_HINT = "set leaderSelection and hostNetworking for the task's replicas"


class Beaker(Environment):
    name = "beaker"
    precedence = 370
    title = "Beaker"
    reads = (COUNT, NODE_RANK, HEAD, JOB)
    caveats = "The head is named only with leaderSelection, and reached only with hostNetworking."
    start = "command: [LAUNCH]   # replicas: 2, leaderSelection: true, hostNetworking: true"
    source = "https://github.com/allenai/beaker-gantry"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        reader = Reader(view.variables)
        if reader.text(COUNT) is None:
            return None
        return counted(
            cls.name, view, reader, count=COUNT, rank=NODE_RANK,
            head=reader.host(HEAD), job_id=reader.text(JOB), hint=_HINT,
        )  # fmt: skip
