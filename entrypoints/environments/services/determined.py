"""Determined's trials: a file in each container has the addresses of all of them, in order of their ranks."""

import json

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.host_names import host_name
from entrypoints.environments.process_view import ProcessView, Reader
from entrypoints.errors import DetectionError

TRIAL = "DET_TRIAL_ID"
ALLOCATION = "DET_ALLOCATION_ID"
RENDEZVOUS = "/run/determined/info/rendezvous.json"


class Determined(Environment):
    name = "determined"
    precedence = 388
    title = "Determined"
    reads = (TRIAL, RENDEZVOUS, ALLOCATION)
    caveats = "Only trials have several containers. DET_SLOT_IDS counts GPUs. On Slurm its variables decide."
    start = "entrypoint: LAUNCH   # resources: {slots_per_trial: 16}"
    source = "https://docs.determined.ai/latest/model-dev-guide/api-guides/apis-howto/api-core-ug.html"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        reader = Reader(view.variables)
        if reader.text(TRIAL) is None:
            return None
        lines = view.lines(RENDEZVOUS)
        if lines is None:
            raise DetectionError(
                f"{TRIAL} is {view.variables[TRIAL]}, but {RENDEZVOUS}, which lists its containers, is missing here",
                hint="mount /run/determined into the container; --single runs on this node alone",
            )
        hosts, rank = _parse("\n".join(lines))
        reader.used[RENDEZVOUS] = f"container_rank={rank}"
        return Allocation(
            environment=cls.name,
            job_id=reader.text(ALLOCATION) or hosts[0],
            node_count=len(hosts),
            node_rank=rank,
            hosts=hosts,
            head=hosts[0] if len(hosts) > 1 else view.hostname,
            variables=reader.used,
        )


def _parse(text: str) -> tuple[tuple[str, ...], int]:
    try:
        document = json.loads(text)
        hosts = tuple(host_name(str(host), RENDEZVOUS, number=True) for host in document["container_addrs"])
        rank = int(document["container_rank"])
    except (ValueError, KeyError, TypeError) as error:
        raise DetectionError(f"{RENDEZVOUS} lacks container_addrs and container_rank, or is not JSON") from error
    if not hosts:
        raise DetectionError(f"{RENDEZVOUS} lists no container")
    return hosts, rank
