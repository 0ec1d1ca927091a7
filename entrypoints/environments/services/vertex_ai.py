"""Google Vertex AI custom jobs: CLUSTER_SPEC has the worker pools and this task's index."""

import json
from typing import Any

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.host_names import host_name
from entrypoints.environments.process_view import ProcessView, Reader
from entrypoints.errors import DetectionError

SPEC = "CLUSTER_SPEC"
JOB = ("CLOUD_ML_JOB_ID", "AIP_TRAINING_JOB_ID")


class VertexAi(Environment):
    name = "vertex_ai"
    precedence = 320
    title = "Google Vertex AI"
    reads = (SPEC, JOB[0])
    caveats = "The index counts within one worker pool. The nodes are all pools in order."
    start = "containerSpec.command: LAUNCH"
    source = "https://cloud.google.com/vertex-ai/docs/training/distributed-training"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        reader = Reader(view.variables)
        text = reader.text(SPEC)
        if text is None or "workerpool" not in text:
            return None
        pools, kind, index = _parse(text)
        if kind not in pools or not 0 <= index < len(pools[kind]):
            raise DetectionError(f"{SPEC} has no task {index} in {kind}")
        ordered = sorted(pools)
        hosts = tuple(host_name(host, SPEC, number=True) for pool in ordered for host in pools[pool])
        before = sum(len(pools[pool]) for pool in ordered if pool < kind)
        reader.used[SPEC] = f"{kind}[{index}]"
        return Allocation(
            environment=cls.name,
            job_id=reader.text(*JOB) or hosts[0],
            node_count=len(hosts),
            node_rank=before + index,
            hosts=hosts,
            head=hosts[0],
            variables=reader.used,
        )


def _parse(text: str) -> tuple[dict[str, list[str]], str, int]:
    try:
        document: Any = json.loads(text)
        pools = {str(name): [str(host) for host in hosts] for name, hosts in document["cluster"].items()}
        return pools, str(document["task"]["type"]), int(document["task"]["index"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DetectionError(f"{SPEC} does not have Vertex AI's format: {text[:80]!r}") from error
