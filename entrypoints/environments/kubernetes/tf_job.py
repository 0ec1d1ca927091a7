"""Kubeflow's TFJob, and all others that set TensorFlow's TF_CONFIG: the cluster's tasks, and which of them this is."""

import json
from typing import Any

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.host_names import host_name
from entrypoints.environments.process_view import ProcessView, Reader
from entrypoints.errors import DetectionError

CONFIG = "TF_CONFIG"

_ORDER = ("chief", "master", "worker", "ps")
"""The kinds of task in the order of their ranks. An evaluator is no part of the cluster."""


class TfJob(Environment):
    name = "tf_job"
    precedence = 522
    title = "Kubeflow TFJob (TF_CONFIG)"
    reads = (CONFIG,)
    caveats = "The index counts within one kind of task. The nodes are chief, master, workers and parameter servers."
    start = "command of all templates: LAUNCH"
    source = "https://www.kubeflow.org/docs/components/trainer/legacy-v1/user-guides/tensorflow/"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        reader = Reader(view.variables)
        text = reader.text(CONFIG)
        if text is None:
            return None
        cluster, kind, index = _parse(text)
        kinds = sorted(cluster, key=lambda name: (_ORDER.index(name) if name in _ORDER else len(_ORDER), name))
        hosts = tuple(host_name(host, CONFIG, number=True) for name in kinds for host in cluster[name])
        if not hosts:
            return None  # a lone task: {"task": …} without a cluster
        if kind not in cluster or not 0 <= index < len(cluster[kind]):
            raise DetectionError(
                f"{CONFIG} has no task {index} of kind {kind!r} in its cluster",
                hint="start `launch` only in tasks of the cluster: an evaluator is none",
            )
        reader.used[CONFIG] = f"{kind}[{index}]"
        return Allocation(
            environment=cls.name,
            job_id=hosts[0],
            node_count=len(hosts),
            node_rank=sum(len(cluster[name]) for name in kinds[: kinds.index(kind)]) + index,
            hosts=hosts,
            head=hosts[0],
            variables=reader.used,
        )


def _parse(text: str) -> tuple[dict[str, list[str]], str, int]:
    try:
        document: Any = json.loads(text)
        cluster = document.get("cluster") or {}
        task = document.get("task") or {"type": "", "index": 0}
        lists = {str(name): [str(host) for host in hosts] for name, hosts in cluster.items()}
        return lists, str(task["type"]), int(task["index"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DetectionError(f"{CONFIG} does not have TensorFlow's format: {text[:80]!r}") from error
