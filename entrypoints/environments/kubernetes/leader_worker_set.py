"""Kubernetes LeaderWorkerSet: each group of a leader and its workers is one job."""

import re

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.process_view import ProcessView, Reader
from entrypoints.errors import DetectionError

LEADER = "LWS_LEADER_ADDRESS"
SIZE = "LWS_GROUP_SIZE"
INDEX = "LWS_WORKER_INDEX"

_NEWER = f"use LeaderWorkerSet 0.6 or newer, or pass the label leaderworkerset.sigs.k8s.io/worker-index as {INDEX}"


class LeaderWorkerSet(Environment):
    name = "leader_worker_set"
    precedence = 500
    title = "Kubernetes LeaderWorkerSet"
    reads = (LEADER, SIZE, INDEX)
    caveats = "The group size includes the leader. Each replica of the set is a separate job."
    start = "command of leaderTemplate and workerTemplate: LAUNCH"
    source = "https://lws.sigs.k8s.io/docs/reference/labels-annotations-and-environment-variables/"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        reader = Reader(view.variables)
        leader = reader.host(LEADER)
        if leader is None:
            return None
        rank = reader.number(INDEX)
        return Allocation(
            environment=cls.name,
            job_id=leader,
            node_count=reader.required_number(SIZE, hint=_NEWER),
            node_rank=_rank_by_name(view, reader, leader) if rank is None else rank,
            head=leader,
            variables=reader.used,
        )


def _rank_by_name(view: ProcessView, reader: Reader, leader: str) -> int:
    """Pods are named `set-group` (the leader) and `set-group-index`."""
    match = re.fullmatch(re.escape(leader.split(".")[0]) + r"(?:-(\d+))?", view.hostname.split(".")[0])
    if match is None:
        raise DetectionError(
            f"{INDEX} is not set, and {view.hostname} is not a pod of the leader {leader}", hint=_NEWER
        )
    reader.used["hostname"] = view.hostname
    return int(match[1] or 0)
