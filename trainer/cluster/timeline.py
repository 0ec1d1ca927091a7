"""Records when workers were busy, and how long they waited for the slowest of their role."""

import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Device = tuple[str, int]
"""The id of a node, and the rank of a slot on it."""

Span = tuple[float, float]


@dataclass
class Answering:
    """A worker that has a call to answer, from `begun` until `ended`; `process` differs after a restart."""

    worker: str
    process: str
    device: Device
    method: str
    begun: float
    ended: float | None = None

    @property
    def role(self) -> str:
        return self.worker.partition(" rank ")[0]

    def within(self, start: float, end: float) -> Span:
        """The part of the call between two times."""
        return max(self.begun, start), min(end if self.ended is None else self.ended, end)


class Waiting(NamedTuple):
    """Seconds that a role's workers waited for the slowest of them, mean over those called, and the worker for which
    they waited longest."""

    seconds: float
    slowest: str


@dataclass(frozen=True)
class Busy:
    """What a timeline shows of the time since `Timeline.begin`: `seconds` long."""

    seconds: float
    answered: Sequence[Answering]
    waiting: Mapping[str, Waiting] = field(default_factory=dict)
    """By role; only those of whose workers several were called together."""

    def idle(self, devices: Collection[Device]) -> float:
        """Seconds in which none of a device's workers had a call to answer, of any role; mean over the devices."""
        spans: dict[Device, list[Span]] = defaultdict(list)
        for call in self._answered():
            spans[call.device].append((call.begun, call.ended or 0.0))
        return sum(self.seconds - covered(spans[device]) for device in devices) / max(1, len(devices))

    def of_workers(self, role: str, method: str) -> list[float]:
        """Seconds in which each worker of a role had such a call to answer; those without one are missing."""
        spans: dict[str, list[Span]] = defaultdict(list)
        for call in self._answered():
            if call.role == role and call.method == method:
                spans[call.process].append((call.begun, call.ended or 0.0))
        return [covered(intervals) for intervals in spans.values()]

    def _answered(self) -> Iterator[Answering]:
        return (call for call in self.answered if (call.ended or 0.0) > call.begun)


class Timeline:
    """Records the calls of a step. Several threads may wait for calls at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._together: list[list[Answering]] = []
        self._begun = time.monotonic()

    def begin(self) -> None:
        """Starts a new interval; running calls continue in it."""
        with self._lock:
            self._begun = time.monotonic()
            running = [[call for call in together if call.ended is None] for together in self._together]
            self._together = [together for together in running if together]

    def add(self, together: Iterable[Answering]) -> None:
        """Adds workers that are called together. Set `ended` as soon as one has answered."""
        with self._lock:
            self._together.append(list(together))

    def since_begin(self) -> Busy:
        """The calls since `begin`, up to now."""
        with self._lock:
            start, end = self._begun, time.monotonic()
            together = [list(ones) for ones in self._together]
        answered = [
            Answering(call.worker, call.process, call.device, call.method, *call.within(start, end))
            for ones in together
            for call in ones
        ]
        return Busy(end - start, answered, _waiting(together, start))


def _waiting(together: Sequence[Sequence[Answering]], start: float) -> dict[str, Waiting]:
    seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))  # by role and slowest worker
    for ones in together:
        by_role: dict[str, list[tuple[float, str]]] = defaultdict(list)
        for call in ones:
            if call.ended is not None:
                by_role[call.role].append((max(start, call.ended), call.worker))
        for role, ends in by_role.items():
            last, slowest = max(ends)
            if len(ends) > 1:
                seconds[role][slowest] += sum(last - end for end, _ in ends) / len(ends)
    return {
        role: Waiting(
            sum(seconds_of_worker.values()), max(seconds_of_worker, key=lambda worker: seconds_of_worker[worker])
        )
        for role, seconds_of_worker in seconds.items()
    }


def covered(spans: Iterable[Span]) -> float:
    """Seconds that lie in at least one of the spans."""
    total, reached = 0.0, float("-inf")
    for begun, ended in sorted(spans):
        total += max(0.0, ended - max(begun, reached))
        reached = max(reached, ended)
    return total
