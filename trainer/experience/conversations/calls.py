"""Calls of users' code, each with a time limit: functions in threads, coroutines in one event loop."""

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

Key = TypeVar("Key")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Failure:
    """The reason why a call has no result."""

    reason: str


class Calls(Generic[Key]):
    """Calls under way, each for a key of the caller's. `at_once` of them run; others wait, in the order of `begin`.

    A call that takes more than `timeout` seconds, counted from its own start, is a Failure. A thread cannot be ended:
    one that hangs is left behind, and dies with the process. `changed` is set when a call has ended.
    """

    def __init__(
        self, timeout: float, at_once: int, changed: threading.Event, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._timeout, self._clock = timeout, clock
        self._at_once = at_once
        self._changed = changed
        self._numbers = count()
        self._waiting: deque[tuple[Key, Callable[[], Any]]] = deque()
        self._running: dict[int, tuple[Key, float]] = {}  # with their deadlines, the earliest first
        self._begun: SimpleQueue[tuple[int, Callable[[], Any]] | None] = SimpleQueue()
        self._ended: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        self._threads = self._busy = 0  # busy: those that hang, too

    def begin(self, key: Key, call: Callable[[], Any]) -> None:
        """Starts a call, or lets it wait for its turn."""
        self._waiting.append((key, call))
        self._fill()

    def close(self) -> None:
        """Ends the threads, each after its call."""
        for _ in range(self._threads):
            self._begun.put(None)

    def finished(self) -> list[tuple[Key, Any]]:
        """The result of each call that has ended since the last time, or its Failure; does not wait."""
        ended = []
        while True:
            try:
                number, result = self._ended.get_nowait()
            except Empty:
                break
            self._busy -= 1
            if number in self._running:  # else it was too late
                ended.append((self._running.pop(number)[0], result))
        now = self._clock()
        for number in [number for number, (_, deadline) in self._running.items() if deadline <= now]:
            ended.append((self._running.pop(number)[0], Failure(f"no answer within {self._timeout:g} s")))
        self._fill()
        return ended

    def wait(self, most: float) -> None:
        """Waits until `changed` is set or a call is too late, `most` seconds at most."""
        earliest = next(iter(self._running.values()), (None, math.inf))[1]
        self._changed.wait(max(0.0, min(most, earliest - self._clock())))

    @property
    def waiting(self) -> int:
        """Calls that were not started yet."""
        return len(self._waiting)

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._at_once:
            (key, call), number = self._waiting.popleft(), next(self._numbers)
            self._running[number] = key, self._clock() + self._timeout
            self._begun.put((number, call))
            self._busy += 1
            if self._busy > self._threads:
                self._threads += 1
                threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while (begun := self._begun.get()) is not None:
            number, call = begun
            try:
                result = call()
            except Exception as error:  # noqa: BLE001 - the user's code may raise anything
                result = Failure(f"{type(error).__name__}: {error}")
            self._ended.put((number, result))
            self._changed.set()


def call_each(calls: Sequence[Callable[[], Any]], timeout: float, at_once: int = 32) -> list[Any]:
    """The result of each call, or its Failure; see `Calls`."""
    changed = threading.Event()
    under_way = Calls[int](timeout, at_once, changed)
    for place, call in enumerate(calls):
        under_way.begin(place, call)
    results: dict[int, Any] = {}
    while len(results) < len(calls):
        under_way.wait(timeout)
        changed.clear()
        results |= under_way.finished()
    under_way.close()
    return [results[place] for place in range(len(calls))]


def wait_for(coroutine: Coroutine[Any, Any, Result], timeout: float | None = None) -> Result:
    """What the coroutine returns, or raises. All coroutines share one loop, so their objects may too.

    Raises TimeoutError after `timeout` seconds, and cancels the coroutine: it would be kept for ever.
    """
    running = asyncio.run_coroutine_threadsafe(coroutine, _loop())
    try:
        return running.result(timeout)
    except TimeoutError as error:
        if not running.cancel():  # it has ended, with an error of its own
            raise
        raise TimeoutError(f"no answer within {timeout:g} s") from error


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="tools", daemon=True).start()
    return loop
