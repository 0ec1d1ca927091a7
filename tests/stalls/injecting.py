"""A job of real workers into which stalls are injected one after the other."""

import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Self
from unittest.mock import patch

import ray

from tests.stalls.faults import ALONE, MEETING, Injection
from tests.stalls.rank import Rank
from trainer.cluster import calls
from trainer.cluster.nodes import connected, find_nodes, reserve_slots
from trainer.cluster.stalls import watch as watching
from trainer.cluster.stalls.explanation import Asked
from trainer.cluster.stalls.watch import Watch
from trainer.cluster.workers import WorkerGroup
from trainer.errors import WorkerError

TIMEOUT = 60.0  # seconds of a call
HEALTHY = 0.1  # seconds of a healthy phase


class Releasing(Watch):
    """Ends the injected fault once it is explained. It knows the healthy time of each phase."""

    def __init__(self, stall_seconds: float, run_dir: Path, release: Callable[[], None]) -> None:
        super().__init__(stall_seconds, run_dir=run_dir)
        self.release, self.explained = release, 0.0
        for phase in MEETING + ALONE:
            self.learn(f"actor {phase}", HEALTHY)

    def stalled(self, asked: Sequence[Asked], seconds: float, ended: Sequence[Asked] = ()) -> None:
        super().stalled(asked, seconds, ended)
        self.explained = time.monotonic()
        self.release()


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Job:
    """Workers in one process group, on this machine or, one each, on the nodes at RAY_ADDRESS; a context manager."""

    def __init__(self, folder: Path, ranks: int, stall_seconds: float, nodes: int = 1) -> None:
        self.nodes = nodes
        self.folder, self.ranks = folder, ranks
        self.stall_seconds = stall_seconds
        self.run_dir = Path("/full") if Path("/full").is_dir() else folder
        self.said = Lines()
        self._stack = ExitStack()
        self._starts = 0

    def __enter__(self) -> Self:
        variables = {"RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(Path(__file__).parents[2])}
        if self.nodes == 1:
            variables["RAY_ADDRESS"] = ""
        self._stack.enter_context(patch.dict(os.environ, variables))
        self._stack.enter_context(connected())
        watching.logger.addHandler(self.said)
        self._stack.callback(watching.logger.removeHandler, self.said)
        self._slots = reserve_slots(find_nodes(self.nodes, 0) * (self.ranks // self.nodes), 0, timeout=TIMEOUT)
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def start(self) -> None:
        """Starts the workers, and lets each phase pass once, so that its time is known."""
        self._starts += 1
        folder = self.folder / str(self._starts)
        folder.mkdir()
        self.group = WorkerGroup[Rank]("actor", timeout=TIMEOUT)
        for slot in self._slots:
            self.group.add(slot, partial(Rank, slot.rank, self.ranks, str(folder)), {}, gpus=0)
        self.pids = self.group.call(Rank.pid)
        for phase in MEETING + ALONE:
            self.run(phase)

    def run(self, phase: str) -> None:
        self.group.call(getattr(Rank, phase))

    def restart(self) -> None:
        for worker in self.group.workers:
            ray.kill(worker.handle)
        self.start()

    @property
    def address(self) -> str:
        return self._slots[0].node.address


@dataclass(frozen=True)
class Result:
    right: bool
    seconds: float
    lines: list[str]


def inject(job: Job, injection: Injection) -> Result:
    """Injects a fault, and waits for the explanation and for the end of the phase."""
    for phase in injection.healthy:
        job.run(phase)
    job.group.call_one(injection.rank, Rank.arm, injection.fault.method, injection.round)
    watch = Releasing(job.stall_seconds, job.run_dir, partial(_release, job, injection))
    begin, died = time.monotonic(), ""
    job.said.lines.clear()
    try:
        with calls.watched(watch):
            job.run(injection.phase)
    except WorkerError as error:
        died = str(error)
    seconds = (watch.explained or time.monotonic()) - begin
    lines = list(job.said.lines)
    if died:
        lines = [died, *lines] if injection.fault.method == "die" else [*lines, died]
        job.restart()
    return Result(len(lines) > 0 and injection.right(job.address, lines), seconds, lines)


def healthy_steps(job: Job, seconds: float) -> tuple[int, int]:
    """Takes phases in a random order; how many, and how many explanations of stalls were logged."""
    random, begin, steps = Random(0), time.monotonic(), 0
    with calls.watched(Releasing(job.stall_seconds, job.run_dir, lambda: None)):
        while time.monotonic() - begin < seconds:
            job.run(random.choice(MEETING + ALONE))
            steps += 1
    return steps, sum(line.startswith("no progress in ") for line in job.said.lines)


def _release(job: Job, injection: Injection) -> None:
    if injection.fault.method == "skip_a_collective":
        job.group.start_one(injection.rank, Rank.meet)
        return
    with suppress(ProcessLookupError):
        os.kill(job.pids[injection.rank], injection.fault.release)
