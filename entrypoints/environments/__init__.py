"""Where are we? The registry of environments and the choice between them."""

from collections.abc import Mapping
from dataclasses import dataclass

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.explicit import Explicit
from entrypoints.environments.single import Single
from entrypoints.environments.slurm import Slurm
from entrypoints.environments.torchrun import Torchrun
from entrypoints.errors import DetectionError

__all__ = ["REGISTRY", "Allocation", "Detection", "Environment", "detect"]

REGISTRY: tuple[type[Environment], ...] = (Explicit, Slurm, Torchrun, Single)
"""In order of precedence: what the user says, then resource managers, then torchrun-style variables (which hooks of the
former also set), then a single node."""


@dataclass(frozen=True, kw_only=True)
class Detection:
    """The allocation that won, and what else was seen."""

    allocation: Allocation
    runners_up: tuple[Allocation, ...]
    conflicts: tuple[str, ...]
    """Where a runner-up says something else, as sentences."""


def detect(variables: Mapping[str, str], hostname: str) -> Detection:
    """Ask every environment, in order; the first that is there wins.

    Raises DetectionError if the environment that should win is malformed: falling through to the next one could start
    one job per node where one job over all nodes was meant.
    """
    winner: Allocation | None = None
    runners_up: list[Allocation] = []
    conflicts: list[str] = []
    for environment in REGISTRY:
        try:
            found = environment.detect(variables, hostname)
        except DetectionError as error:
            if winner is None:
                raise
            conflicts.append(f"{environment.name} cannot be used ({error.message}); {winner.environment} wins")
            continue
        if found is None or (winner is not None and environment is Single):
            continue
        if winner is None:
            winner = found
        else:
            runners_up.append(found)
            conflicts += _differences(winner, found)
    assert winner is not None, "the last environment is always there"
    return Detection(allocation=winner, runners_up=tuple(runners_up), conflicts=tuple(conflicts))


def _differences(winner: Allocation, other: Allocation) -> list[str]:
    questions = {"node_count": "nodes", "node_rank": "node rank"}  # a head may be spelled in several right ways
    return [
        f"{label}: {winner.environment} says {getattr(winner, field)} ({winner.reason}), "
        f"{other.environment} says {getattr(other, field)} ({other.reason}); {winner.environment} wins"
        for field, label in questions.items()
        if getattr(winner, field) != getattr(other, field)
    ]
