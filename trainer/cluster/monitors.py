"""The processes that watch a run's GPUs, one on each node."""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import GetTimeoutError, RayError

from trainer.cluster.gpu_utilization import GpuSampler
from trainer.cluster.workers import WorkerGroup

logger = logging.getLogger(__name__)

PATIENCE = 2.0  # seconds that a step waits for all of them


class GpuMonitors:
    """Tells how busy the GPUs of some groups of workers are. It never raises: a node that fails is missing, and the
    log says so once."""

    def __init__(self, groups: Sequence[WorkerGroup[Any]]) -> None:
        """Starts a monitor on each node with GPUs; returns at once."""
        workers = [worker for group in groups for worker in group.workers if worker.spec.slot.device == "cuda"]
        nodes = {worker.spec.slot.node.id: worker.spec.slot for worker in workers}
        monitors = WorkerGroup[GpuSampler]("monitor", PATIENCE)
        for slot in nodes.values():
            monitors.add(slot, partial(GpuSampler), {}, 0.0)
        self._monitors = dict(zip(nodes, monitors.workers, strict=True))
        self._late: dict[str, ObjectRef] = {}
        # The GPUs that Ray gave the workers, on their nodes. An engine that starts answers later.
        self._asked = [(worker.spec.slot.node.id, worker.handle.gpus.remote()) for worker in workers]
        self._gpus: set[tuple[str, str]] = set()

    def utilization(self, seconds: float) -> list[float]:
        """The mean utilisation of each GPU of the run in the last seconds; empty without GPUs."""
        if not self._monitors:
            return []
        self._learn_gpus()
        idle = {node: worker for node, worker in self._monitors.items() if self._answered(node)}
        asked = {node: worker.handle.call.remote("mean", (seconds,), {}) for node, worker in idle.items()}
        if asked:
            ray.wait(list(asked.values()), num_returns=len(asked), timeout=PATIENCE)
        shares: dict[tuple[str, str], float] = {}
        for node, answer in asked.items():
            try:
                shares |= {(node, gpu): share for gpu, share in ray.get(answer, timeout=0).items()}
            except GetTimeoutError:
                self._late[node] = answer
            except RayError as error:
                address = self._monitors.pop(node).spec.slot.node.address
                cause = str(error).partition("\n")[0]
                logger.warning("gpu/utilization lacks %s from now on, because its monitor failed: %s", address, cause)
        return [shares[gpu] for gpu in self._gpus if gpu in shares]

    def _answered(self, node: str) -> bool:
        """Whether the monitor has nothing left to answer, so that a node that hangs is waited for only once."""
        if node in self._late and ray.wait([self._late[node]], timeout=0)[0]:
            del self._late[node]
        return node not in self._late

    def _learn_gpus(self) -> None:
        pending = []
        for node, answer in self._asked:
            try:
                self._gpus |= {(node, gpu) for gpu in ray.get(answer, timeout=0)}
            except GetTimeoutError:
                pending.append((node, answer))
            except RayError:  # the worker died; another in its slot has the same GPU
                continue
        self._asked = pending
