"""The hello with which a node introduces itself to the head, and the head's reasons to refuse it."""

import platform
import time
from collections.abc import Mapping
from types import NoneType
from typing import Literal

from entrypoints.host.accelerators import count_gpus, hidden_devices, may_use_gpus
from entrypoints.host.control_groups import available_cpus
from entrypoints.host.tree import Tree
from entrypoints.host.versions import installed
from entrypoints.job.node import Node
from entrypoints.logs import limited
from entrypoints.wire.channel import MalformedError, Message, field, shortened
from entrypoints.wire.rendezvous import own_addresses

_MUST_AGREE = {
    "job_id": "job",
    "node_count": "number of nodes",
    "python": "Python",
    "ray": "Ray",
    "slipway": "Slipway",
    "image": "image",
    "tls": "--tls",
}

_FORM: dict[str, tuple[type, ...]] = {
    "rank": (int,),
    "local_rank": (int,),
    "hostname": (str,),
    "cpus": (int,),
    "gpus": (int,),
    "fabric": (dict,),
    "unfit": (list,),
    "clock": (int, float),
    "request": (str, NoneType),
}
_OF_A_FINDING = ("check", "message", "fix")
_LONGEST_FINDING = 1_000
"""Characters of a text of a finding in the hello."""

MOST_SKEW = 60.0
"""Most seconds between two nodes' clocks. Beyond that tokens expire and logs mislead."""


def say_hello(node: Node) -> Message:
    """This node's hello: who it is, what it has, and the versions that must agree."""
    return {
        "rank": node.allocation.node_rank,
        "local_rank": node.allocation.local_rank,
        "hostname": node.hostname,
        "cpus": available_cpus() if (cpus := _named(node, "cpus")) is None else cpus,
        "gpus": usable_gpus(_named(node, "gpus"), node.host.target, node.environment, Tree()),
        "fabric": node.host.fabric.summary(),
        "unfit": [
            {name: shortened(text, _LONGEST_FINDING) for name, text in finding.items()} for finding in node.unfit
        ],
        "clock": time.time(),
        "job_id": node.allocation.job_id,
        "node_count": node.allocation.node_count,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "ray": installed("ray"),
        "slipway": node.host.slipway,
        "image": node.host.image,
        "tls": node.key is not None,
        "request": node.key.request(own_addresses()) if node.key is not None else None,
    }


def check_form(hello: Message) -> None:
    """Raise MalformedError unless all values that a job reads from a hello are of the right type."""
    for name, kinds in _FORM.items():
        field(hello, name, *kinds)
    for finding in hello["unfit"]:
        if not isinstance(finding, dict) or any(not isinstance(finding.get(name), str) for name in _OF_A_FINDING):
            raise MalformedError(f"unfit holds {shortened(repr(finding), 100)}")


def reason_to_refuse(ours: Message, theirs: Message) -> str | None:
    """Why the head refuses a node, or None. `theirs` has the right form, from a node that holds the token."""
    for name, label in _MUST_AGREE.items():
        if ours.get(name) != theirs.get(name):
            there, here = ("none" if value is None else value for value in (theirs.get(name), ours.get(name)))
            return f"{label} differs: {there} there, {here} on the head"
    if abs(skew := theirs["clock"] - time.time()) > MOST_SKEW:
        return f"its clock is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} the head's"
    if not 0 <= theirs["rank"] < ours["node_count"]:
        return f"rank {theirs['rank']} is not below {ours['node_count']} nodes"
    return None


def unverified(ours: Message, theirs: Message) -> str:
    """A warning if neither side has a version to compare; else empty."""
    if ours["slipway"] is None and theirs.get("slipway") is None:
        return "Slipway's version is unknown on both nodes, so a difference would go unnoticed"
    return ""


def _named(node: Node, resource: Literal["cpus", "gpus"]) -> int | None:
    """The user's number for Ray; None if Ray counts by itself."""
    return getattr(node.options.ray, resource) if node.options.ray else None


def usable_gpus(named: int | None, target: str | None, variables: Mapping[str, str], tree: Tree) -> int:
    """The number of GPUs that Ray should find on this node: the user's, else all; none in a cpu image."""
    if named is not None:
        return named
    if not may_use_gpus(target):
        return 0
    return min([count_gpus(tree), *hidden_devices(variables).values()])


def missing_gpus(announced: Mapping[str, int], registered: Mapping[str, int]) -> str:
    """A sentence about the GPUs that hosts announced and Ray did not find; empty if it found all."""
    if sum(registered.values()) >= sum(announced.values()):
        return ""
    fewer = {host: count for host, count in announced.items() if registered.get(host, count) < count}
    if not fewer:  # Ray calls the hosts by other names
        return f"Ray found {sum(registered.values())} of {sum(announced.values())} GPUs"
    return "Ray found " + ", ".join(
        limited([f"{registered[host]} of {count} GPUs on {host}" for host, count in fewer.items()])
    )
