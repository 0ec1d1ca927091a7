"""Detects hangs: a call to workers, or the controller itself, takes far longer than before."""

import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from trainer.cluster.stalls.explanation import LINES, Asked, Explanation, explain, own_frames, position
from trainer.cluster.stalls.hosts import read_counters, read_host
from trainer.cluster.stalls.page import write_stall
from trainer.cluster.stalls.reading import Readers, Reading
from trainer.cluster.stalls.slow import SlowWorkers
from trainer.cluster.stalls.stacks import Frame, Standing, is_busy

logger = logging.getLogger(__name__)

# A call stalls if it takes this long and, if there was such a call before, this many times as long as the longest.
SECONDS, TIMES = 60.0, 3.0
# The share of its time limit after which the first call of a kind stalls: it may load or compile.
SHARE_AT_FIRST = 0.5


class Watch:
    """Measures how long calls take, and explains those that hang."""

    def __init__(self, seconds: float = SECONDS, ends: bool = False, run_dir: Path | None = None) -> None:
        """`ends`: a stalled call ends as if its time limit were over. `run_dir` gets the page."""
        self._ends = ends
        self._seconds = seconds
        self._run_dir = run_dir
        self._slow = SlowWorkers()
        self._readers = Readers()
        self._longest: dict[str, float] = {}
        self._calls = 0  # that this process waits for
        self._changed = time.monotonic()
        self._lock = threading.Lock()

    def seconds(self, kind: str, limit: float) -> float:
        """Seconds after which a call of this kind counts as hung, given its timeout."""
        longest = self._longest.get(kind)
        return max(self._seconds, SHARE_AT_FIRST * limit if longest is None else TIMES * longest)

    def limit(self, kind: str, limit: float) -> float:
        """Seconds after which such a call ends, answered or not."""
        return min(limit, self.seconds(kind, limit)) if self._ends else limit

    def learn(self, kind: str, seconds: float, asked: Sequence[Asked] = ()) -> None:
        """A call of a kind took so long. Once one repeats, the first step is over: the nodes of the workers that it
        `asked` get ready for a stall, in which they may start no process."""
        if kind in self._longest:
            self.prepare(asked)
        self._longest[kind] = max(seconds, self._longest.get(kind, 0.0))

    def compare(self, method: str, seconds: Mapping[str, float]) -> None:
        """Logs which worker is far slower than the others; `seconds` that each took for the same call."""
        if straggler := self._slow.compare(method, seconds):
            logger.warning("slow in %s: %s", method, straggler)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Marks that this process waits for calls, so that it does not count as hung itself."""
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def prepare(self, asked: Sequence[Asked]) -> None:
        """Gets ready to read where these workers stand, because they may stall."""
        self._readers.prepare(asked)

    def stalled(self, asked: Sequence[Asked], seconds: float, ended: Sequence[Asked] = ()) -> None:
        """Explains, in the log and on the page, why these calls have not ended for so long; others have `ended`."""
        reading = self._readers.read(asked, self._run_dir, ended)
        if any(
            standing.problem or own_frames(standing) for standing in reading.standings.values()
        ):  # else they have ended by now
            self._say(asked[0].method, seconds, explain(reading.standings, ended, reading.hosts), reading)

    def over(self, asked: Sequence[Asked], seconds: float, ended: Sequence[Asked] = ()) -> Explanation:
        """The same for calls whose time limit is over; the caller's error says it, so that the log does not."""
        reading = self._readers.read(asked, self._run_dir, ended)
        explanation = explain(reading.standings, ended, reading.hosts)
        if self._run_dir:
            write_stall(self._run_dir, asked[0].method, seconds, explanation, reading)
        return explanation

    @property
    def hint(self) -> str:
        """The hint for calls that end because they hang; empty if only their timeout ends them."""
        if not self._ends:
            return ""
        return "trainer.on_stall=continue waits for trainer.worker_timeout; trainer.stall_seconds notices it later"

    @contextmanager
    def controller(self, limit: float) -> Iterator[None]:
        """Also explains when this process itself makes no progress, which `limit` bounds only at first."""
        ended = threading.Event()
        main = threading.get_ident(), threading.get_native_id()
        thread = threading.Thread(target=self._look, args=(ended, main, limit), name="stalls", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()

    def _look(self, ended: threading.Event, main: tuple[int, int], limit: float) -> None:
        explained = 0.0
        while not ended.wait(min(5.0, self._seconds / 4)):
            with self._lock:
                since, calls = self._changed, self._calls
            passed = time.monotonic() - since
            if calls or since == explained or passed < self.seconds("controller", limit):
                continue
            explained = since
            before = read_counters()
            here = Asked("the controller", "", "the controller", None, socket.gethostname())
            standing = _standing_of(*main)
            where = position(standing.threads[0], standing.busy)
            line = f"the controller on {here.address}, process {os.getpid()}, {where}"
            reading = Reading({here: standing}, {here.address: read_host(before, self._run_dir)})
            self._say("the controller", passed, Explanation((here,), (line,)), reading)

    def _count(self, change: int) -> None:
        with self._lock:
            now = time.monotonic()
            if self._calls == 0:
                self.learn("controller", now - self._changed)
            self._calls += change
            self._changed = now

    def _say(self, method: str, seconds: float, explanation: Explanation, reading: Reading) -> None:
        problems = [
            f"{address}: {problem}"
            for address, host in reading.hosts.items()
            for problem in (host.problems if host else ["does not answer"])
        ]
        lines = [*explanation.lines, *problems]
        logger.warning("no progress in %s for %.0f s:", method, seconds)
        for line in lines[: LINES - 1]:
            logger.warning("  %s", line)
        page = write_stall(self._run_dir, method, seconds, explanation, reading) if self._run_dir else None
        if page is not None:
            more = f"{len(lines) - LINES + 1} more lines, stacks" if len(lines) >= LINES else "stacks"
            logger.warning("  %s and the state of every node: %s", more, page)


def _standing_of(thread: int, native: int) -> Standing:
    """Where a thread of this process stands, by Python's and the kernel's number."""
    busy = is_busy(Path(f"/proc/self/task/{native}"))
    frame = sys._current_frames().get(thread)
    stack = traceback.extract_stack(frame)[::-1] if frame else []
    return Standing("", (tuple(Frame(entry.filename, entry.lineno or 0, entry.name) for entry in stack),), busy)
