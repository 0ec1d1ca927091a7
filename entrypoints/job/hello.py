"""What a node says about itself when it meets the head, and what the head cannot accept."""

import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path

from entrypoints.host.versions import installed
from entrypoints.job.node import Node
from entrypoints.wire.channel import Message

_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_MUST_AGREE = {
    "job_id": "job",
    "node_count": "number of nodes",
    "python": "Python",
    "ray": "Ray",
    "slipway": "Slipway",
    "image": "image",
}


MOST_SKEW = 60.0
"""Seconds between two nodes' clocks; with more, tokens expire and logs mislead."""


def say_hello(node: Node) -> Message:
    return {
        "rank": node.allocation.node_rank,
        "local_rank": node.allocation.local_rank,
        "hostname": node.hostname,
        "cpus": len(os.sched_getaffinity(0)),
        "gpus": usable_gpus(node.options.ray.gpus if node.options.ray else None, node.host.target, node.environment),
        "fabric": node.host.fabric.summary(),
        "unfit": list(node.unfit),
        "clock": time.time(),
        "job_id": node.allocation.job_id,
        "node_count": node.allocation.node_count,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "ray": installed("ray"),
        "slipway": node.host.slipway,
        "image": node.host.image,
    }


def objection(ours: Message, theirs: Message) -> str | None:
    """Why this node cannot take part, or None. `theirs` is proven to come from one who knows the token."""
    for field, label in _MUST_AGREE.items():
        if ours[field] != theirs.get(field):
            there, here = ("none" if value is None else value for value in (theirs.get(field), ours[field]))
            return f"{label} differs: {there} there, {here} on the head"
    if abs(skew := theirs["clock"] - time.time()) > MOST_SKEW:
        return f"its clock is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} the head's"
    if not 0 <= theirs["rank"] < ours["node_count"]:
        return f"rank {theirs['rank']} is not below {ours['node_count']} nodes"
    return None


def unverified(ours: Message, theirs: Message) -> str:
    """A warning if neither side knows Slipway's version, so that equality proves nothing; else empty."""
    if ours["slipway"] is None and theirs.get("slipway") is None:
        return "Slipway's version is unknown on both nodes, so a difference would go unnoticed"
    return ""


def usable_gpus(named: int | None, target: str | None, variables: Mapping[str, str], root: Path = Path("/")) -> int:
    """The GPUs that Ray is to find on this node: those that the user named, else all; none with a cpu image."""
    if named is not None:
        return named
    if target == "cpu":
        return 0
    count = count_gpus(root)
    for name in _VISIBLE:
        if name in variables:
            count = min(count, len([device for device in variables[name].split(",") if device.strip()]))
    return count


def missing_gpus(announced: Mapping[str, int], found: Mapping[str, int]) -> str:
    """What Ray lacks of the GPUs that the hosts announced, in words; empty if it has them all."""
    if sum(found.values()) >= sum(announced.values()):
        return ""
    fewer = {host: count for host, count in announced.items() if found.get(host, count) < count}
    if not fewer:  # hosts have other names for Ray
        return f"Ray found {sum(found.values())} of {sum(announced.values())} GPUs"
    return "Ray found " + ", ".join(f"{found[host]} of {count} GPUs on {host}" for host, count in fewer.items())


def count_gpus(root: Path = Path("/")) -> int:
    """GPUs that this container can open: NVIDIA's device files, or AMD's nodes in the kernel's topology."""
    nvidia = [path for path in root.glob("dev/nvidia*") if path.name.removeprefix("nvidia").isdigit()]
    if nvidia:
        return len(nvidia)
    ids = root.glob("sys/class/kfd/kfd/topology/nodes/*/gpu_id")
    return sum(path.read_text(encoding="ascii").strip() != "0" for path in ids)
