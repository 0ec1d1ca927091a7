"""Checks and findings: a check examines one fact of this node and finds it good, or tells the fix."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from entrypoints.environments import Allocation
from entrypoints.host.accelerators import Accelerator, accelerator_of, may_use_gpus
from entrypoints.host.settings import Host
from entrypoints.host.tree import Tree

GIB = 1024**3
MIB = 1024**2


class Verdict(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    WARN = "warn"
    """The job works, but slower or less safely than it could."""
    FAIL = "fail"
    """The job would hang or break later."""
    SKIP = "skip"
    """The check does not apply here."""


@dataclass(frozen=True)
class Finding:
    """The result of a check. `fix` tells what to do about a problem."""

    check: str
    verdict: Verdict
    message: str
    fix: str = ""

    def document(self) -> dict[str, Any]:
        """The finding for JSON."""
        return {**asdict(self), "verdict": str(self.verdict)}


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """The facts about this node that checks examine."""

    tree: Tree
    host: Host
    allocation: Allocation
    variables: Mapping[str, str]
    target: str | None
    """`cpu`, `cuda` or `rocm`; None outside an image."""
    control_port: int
    chosen_port: int | None = None
    """The control port if the user chose it."""
    temporary: Path = Path("/tmp")
    use_gpus: bool = True
    """False with `--num-gpus 0`: a head that drives the job only."""
    cpus: int = 1
    """The CPUs that Ray may use."""
    object_store: int | None = None
    """The bytes of Ray's object store if the user chose them."""

    @property
    def rdma(self) -> bool:
        """Whether training uses RDMA adapters. Without GPUs it uses Gloo, over sockets."""
        return self.host.fabric.kind != "ethernet" and self.uses_gpus

    @property
    def uses_gpus(self) -> bool:
        """Whether this node may train on GPUs."""
        return may_use_gpus(self.target) and self.use_gpus

    @property
    def accelerator(self) -> Accelerator | None:
        """The accelerator that this node uses; None for the cpu image, outside an image, and without GPUs."""
        return accelerator_of(self.target) if self.use_gpus else None

    @property
    def gpus(self) -> int:
        """The number of GPUs that the drivers report; 0 if this node uses none."""
        return len(self.host.fabric.gpus) if self.use_gpus else 0

    @property
    def severe(self) -> Verdict:
        """The verdict on a slow or broken network: a failure, but only a warning for a single node."""
        return Verdict.FAIL if self.allocation.node_count > 1 else Verdict.WARN


Check = Callable[[NodeFacts], Finding]


def ok(check: str, message: str) -> Finding:
    """A finding without a problem."""
    return Finding(check, Verdict.OK, message)


def skip(check: str, message: str) -> Finding:
    """A finding for a check that does not apply."""
    return Finding(check, Verdict.SKIP, message)
