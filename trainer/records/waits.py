"""For whom the workers of a run waited, from its records."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class WaitedFor:
    """A worker that was the slowest of its role in some steps, and the seconds that the others waited in these."""

    role: str
    worker: str
    steps: int
    seconds: float


def waited_for(waits: Sequence[dict[str, Any]]) -> list[WaitedFor]:
    """The slowest workers in these rows of a run's waits; the one that cost most first."""
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in waits:
        for role, wait in row["waits"].items():
            seconds[role, wait["slowest"]].append(wait["seconds"])
    found = [WaitedFor(role, worker, len(own), sum(own)) for (role, worker), own in seconds.items()]
    return sorted(found, key=lambda one: -one.seconds)
