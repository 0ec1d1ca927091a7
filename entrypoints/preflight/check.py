"""What a check is: a small question about this node, with an answer and, where it is bad, the way to mend it."""

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
    OK = "ok"
    WARN = "warn"
    """Works, but slower or less safely than it could."""
    FAIL = "fail"
    """The job would hang or break later."""
    SKIP = "skip"
    """The question does not arise here."""


@dataclass(frozen=True)
class Finding:
    """What a check found; `fix` says what to do about it."""

    check: str
    verdict: Verdict
    message: str
    fix: str = ""

    def document(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": str(self.verdict)}


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """All that checks look at."""

    tree: Tree
    host: Host
    allocation: Allocation
    variables: Mapping[str, str]
    target: str | None
    """`cpu`, `cuda` or `rocm`; None outside an image."""
    control_port: int
    chosen_port: int | None = None
    """The same, if the user said it."""
    temporary: Path = Path("/tmp")

    @property
    def rdma(self) -> bool:
        """Whether training uses RDMA adapters. Without GPUs it uses Gloo, over sockets."""
        return self.host.fabric.kind != "ethernet" and may_use_gpus(self.target)

    @property
    def accelerator(self) -> Accelerator | None:
        """The accelerator that the image is for; None for the cpu image and outside an image."""
        return accelerator_of(self.target)

    @property
    def gpus(self) -> int:
        return len(self.host.fabric.gpus)

    @property
    def severe(self) -> Verdict:
        """How bad a slow or broken network is: alone a node does not need it."""
        return Verdict.FAIL if self.allocation.node_count > 1 else Verdict.WARN


Check = Callable[[NodeFacts], Finding]


def ok(check: str, message: str) -> Finding:
    return Finding(check, Verdict.OK, message)


def skip(check: str, message: str) -> Finding:
    return Finding(check, Verdict.SKIP, message)
