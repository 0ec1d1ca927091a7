"""The memory of each node's devices, read on the node."""

from collections.abc import Sequence
from dataclasses import replace

import psutil
import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trainer.cluster.nodes import ClusterNode
from trainer.errors import WorkerError

GIB = 2**30


def with_memory(nodes: Sequence[ClusterNode], device: str, timeout: float) -> list[ClusterNode]:
    """The nodes of a cluster with the memory of their devices.

    Raises WorkerError if a node has not answered after `timeout` seconds.
    """
    here = ray.get_runtime_context().get_node_id()
    # Not with a task on this node: a process for it would hold up the start of every run on one node.
    asked = {node.id: _ask(node, device) for node in nodes if node.id != here}
    local_gib = device_memory(device) if len(asked) < len(nodes) else None
    try:
        told = dict(zip(asked, ray.get(list(asked.values()), timeout=timeout), strict=True))
    except (GetTimeoutError, RayError) as error:
        cause = str(error).partition("\n")[0]
        raise WorkerError(f"a node did not tell the memory of its devices within {timeout:g} s: {cause}") from error
    return [replace(node, device_gib=told.get(node.id, local_gib)) for node in nodes]


def _ask(node: ClusterNode, device: str) -> "ray.ObjectRef[float | None]":
    there = NodeAffinitySchedulingStrategy(node.id, soft=False)
    return ray.remote(device_memory).options(num_cpus=0, scheduling_strategy=there).remote(device)


def device_memory(device: str) -> float | None:
    """GiB of this node's GPU with the least memory, or of the node itself for `cpu`; None if unknown."""
    if device == "cpu":
        return float(psutil.virtual_memory().total / GIB)
    return min(_nvidia_memory(), default=None)


def device_count() -> int:
    """The GPUs of this machine that NVIDIA's driver names; 0 without that driver."""
    return len(_nvidia_memory())


def _nvidia_memory() -> list[float]:
    """GiB of each GPU; nothing if they are AMD's, or if this image or machine lacks NVIDIA's libraries."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(at) for at in range(pynvml.nvmlDeviceGetCount())]
        return [float(pynvml.nvmlDeviceGetMemoryInfo(handle).total / GIB) for handle in handles]
    except pynvml.NVMLError:
        return []
