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
    waited = [WaitedFor(role, worker, len(durations), sum(durations)) for (role, worker), durations in seconds.items()]
    return sorted(
        (wait for wait in waited if wait.seconds >= NOTICED * seconds_of_steps), key=lambda wait: -wait.seconds
    )
