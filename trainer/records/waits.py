"""For whom the workers of a run waited, from its records."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.records.files.records import WaitsRow

NOTICED = 0.005  # of the steps' time


@dataclass(frozen=True)
class WaitedFor:
    """A worker that was the slowest of its role in some steps, and the seconds that the others waited in these."""

    role: str
    worker: str
    steps: int
    seconds: float


def noticed(waits: Sequence[WaitsRow], seconds_of_steps: float) -> list[WaitedFor]:
    """The slowest workers in these rows of a run's waits that cost a noticeable part of the steps; the worst first."""
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in waits:
        for role, wait in row["waits"].items():
            seconds[role, wait["slowest"]].append(wait["seconds"])
    found = [WaitedFor(role, worker, len(own), sum(own)) for (role, worker), own in seconds.items()]
    return sorted((one for one in found if one.seconds >= NOTICED * seconds_of_steps), key=lambda one: -one.seconds)
