"""What a node says about itself when it meets the head, and what the head cannot accept."""

import os
import platform
import time
from pathlib import Path

from entrypoints.channel import Message
from entrypoints.node import Node
from entrypoints.versions import installed

_MUST_AGREE = {"job_id": "job", "node_count": "number of nodes", "python": "Python", "ray": "Ray", "slipway": "Slipway"}


MOST_SKEW = 60.0
"""Seconds between two nodes' clocks; with more, tokens expire and logs mislead."""


def say_hello(node: Node) -> Message:
    return {
        "rank": node.allocation.node_rank,
        "local_rank": node.allocation.local_rank,
        "hostname": node.hostname,
        "cpus": len(os.sched_getaffinity(0)),
        "gpus": count_gpus(),
        "fabric": node.host.fabric.summary(),
        "unfit": list(node.unfit),
        "clock": time.time(),
        "job_id": node.allocation.job_id,
        "node_count": node.allocation.node_count,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "ray": installed("ray"),
        "slipway": installed("slipway"),
    }


def objection(ours: Message, theirs: Message) -> str | None:
    """Why this node cannot take part, or None. `theirs` is proven to come from one who knows the token."""
    for field, label in _MUST_AGREE.items():
        if ours[field] != theirs.get(field):
            return f"{label} differs: {theirs.get(field)} there, {ours[field]} on the head"
    if abs(skew := theirs["clock"] - time.time()) > MOST_SKEW:
        return f"its clock is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} the head's"
    if not 0 <= theirs["rank"] < ours["node_count"]:
        return f"rank {theirs['rank']} is not below {ours['node_count']} nodes"
    return None


def count_gpus(root: Path = Path("/")) -> int:
    """GPUs that this container can open: NVIDIA's device files, or AMD's nodes in the kernel's topology."""
    nvidia = [path for path in root.glob("dev/nvidia*") if path.name.removeprefix("nvidia").isdigit()]
    if nvidia:
        return len(nvidia)
    ids = root.glob("sys/class/kfd/kfd/topology/nodes/*/gpu_id")
    return sum(path.read_text(encoding="ascii").strip() != "0" for path in ids)
