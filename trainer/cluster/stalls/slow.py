"""Detects stragglers: a worker that takes far longer than the others, call after call."""

import statistics
from collections.abc import Mapping

# A worker is slow if it takes this many times the median of the others, and at least SECONDS, in CALLS calls in a row.
TIMES, SECONDS, CALLS = 2.0, 1.0, 5


class SlowWorkers:
    """Compares the workers of each kind of call.

    Ranks that meet in collectives end together, whoever is slow: it tells engines and reward workers apart only.
    """

    def __init__(self) -> None:
        self._in_a_row: dict[str, tuple[str, int]] = {}

    def compare(self, kind: str, seconds: Mapping[str, float]) -> str:
        """The message to log after a call, given each worker's seconds; empty if there is no new straggler."""
        if len(seconds) < 2:
            return ""
        slowest = max(seconds, key=lambda worker: seconds[worker])
        others = statistics.median(taken for worker, taken in seconds.items() if worker != slowest)
        if seconds[slowest] < max(SECONDS, TIMES * others):
            self._in_a_row.pop(kind, None)
            return ""
        before, count = self._in_a_row.get(kind, ("", 0))
        count = count + 1 if before == slowest else 1
        self._in_a_row[kind] = (slowest, count)
        if count != CALLS:  # said once
            return ""
        times = seconds[slowest] / max(others, 0.001)
        return f"{slowest} took {times:.1f} times the median of the others in each of the last {CALLS} calls"
