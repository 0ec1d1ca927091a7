"""What every environment answers, and how it reads variables."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from entrypoints.errors import DetectionError


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """What one environment says about this job, and where it read that."""

    environment: str
    job_id: str
    """Equal on every node of the job, different between jobs."""
    node_count: int
    node_rank: int
    local_rank: int = 0
    """Several tasks may run on one node; only task 0 forms Ray, the others wait."""
    hosts: tuple[str, ...] | None = None
    """In order of rank; None where the environment names only the head."""
    head: str
    """Name or address of node rank 0, as its peers can resolve it."""
    variables: Mapping[str, str]
    """The variables that decided, with their values."""

    def __post_init__(self) -> None:
        if self.node_count < 1:
            raise DetectionError(f"{self.environment}: the number of nodes is {self.node_count}, not at least 1")
        if not 0 <= self.node_rank < self.node_count:
            raise DetectionError(f"{self.environment}: node rank {self.node_rank} is not below {self.node_count} nodes")
        if self.local_rank < 0:
            raise DetectionError(f"{self.environment}: local rank {self.local_rank} is negative")
        if self.hosts is not None and len(self.hosts) != self.node_count:
            raise DetectionError(
                f"{self.environment}: {len(self.hosts)} hosts are listed for {self.node_count} nodes",
                hint=f"they come from {self.reason}",
            )

    @property
    def is_head(self) -> bool:
        return self.node_rank == 0 and self.local_rank == 0

    @property
    def reason(self) -> str:
        """The deciding variables as a person would write them."""
        return " ".join(f"{name}={value}" for name, value in self.variables.items()) or "nothing else is set"

    def host(self, rank: int) -> str | None:
        """The name of a node, where the environment knows it."""
        if self.hosts is not None:
            return self.hosts[rank]
        return self.head if rank == 0 else None


class Environment(ABC):
    """One way in which nodes can learn of each other. Subclasses are registered in `environments.REGISTRY`."""

    name: ClassVar[str]

    @classmethod
    @abstractmethod
    def detect(cls, variables: Mapping[str, str], hostname: str) -> Allocation | None:
        """Return what this environment says, or None where it is not there.

        Raises DetectionError where it is there but its variables are malformed or lack this node's identity.
        """


class Reader:
    """Reads variables and remembers which were used; an empty value counts as unset."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables
        self.used: dict[str, str] = {}

    def text(self, *names: str) -> str | None:
        """The first of these variables that is set."""
        for name in names:
            if value := self._variables.get(name, "").strip():
                self.used[name] = value
                return value
        return None

    def number(self, *names: str) -> int | None:
        """The first of these variables that is set, as a whole number."""
        text = self.text(*names)
        if text is None:
            return None
        if not (text.isascii() and text.isdigit()) or len(text) > 9:
            name = next(name for name in names if name in self.used)
            raise DetectionError(f"{name} is {text!r}, not a whole number")
        return int(text)

    def required_number(self, *names: str, hint: str) -> int:
        """Like number(), for what must never be guessed: a wrong identity is worse than none."""
        number = self.number(*names)
        if number is None:
            raise DetectionError(f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} not set", hint=hint)
        return number
