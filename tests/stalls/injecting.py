"""A job of real workers into which stalls are injected one after the other; a fault ends once it is explained."""

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import ray

from tests.stalls.faults import ALONE, FULL_DISK, MEETING, Injection
from tests.stalls.rank import BEGUN, Rank
from tests.trainer.ray_node import ray_node
from trainer.cluster import calls
from trainer.cluster.nodes import find_nodes, reserve_slots
from trainer.cluster.stalls import watch as watching
from trainer.cluster.stalls.explanation import Asked, Explanation
from trainer.cluster.stalls.reading import Reading
from trainer.cluster.stalls.watch import Watch
from trainer.cluster.workers import WorkerGroup
from trainer.errors import WorkerError

TIMEOUT = 60.0  # seconds of a call
HEALTHY = 0.1  # seconds of a healthy phase


class Releasing(Watch):
    """Ends the injected fault once it is explained. It knows the healthy time of each phase."""

    def __init__(self, stall_seconds: float, run_dir: Path) -> None:
        super().__init__(stall_seconds, run_dir=run_dir)
        self.release: Callable[[], None] = lambda: None
        self.explained = 0.0
        for phase in MEETING + ALONE:
            self.learn(f"actor {phase}", HEALTHY)
        self.learn("controller", HEALTHY)

    def learn(self, kind: str, seconds: float, asked: Sequence[Asked] = ()) -> None:
        """A busy machine makes no phase a long one."""
        super().learn(kind, min(seconds, HEALTHY), asked)

    def ready(self, asked: Sequence[Asked]) -> None:
        """Returns once each node has its reader, as in any run after its first step."""
        silent = [address for address, host in self._readers.read(asked).hosts.items() if host is None]
        assert not silent, f"no reader of stalls on {silent}"

    def _say(self, method: str, seconds: float, explanation: Explanation, reading: Reading) -> None:
        super()._say(method, seconds, explanation, reading)
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
    """Workers in one process group, on this machine's Ray cluster."""

    def __init__(self, folder: Path, ranks: int, watch: Releasing, said: Lines) -> None:
        self.folder, self.ranks, self.watch, self.said = folder, ranks, watch, said
        self.slots = reserve_slots(find_nodes(1, 0) * ranks, 0, timeout=TIMEOUT)
        self._starts = 0
        self.start()

    def start(self) -> None:
        """Starts the workers, and lets each phase pass once."""
        self._starts += 1
        folder = self.folder / str(self._starts)
        folder.mkdir()
        self.begun = folder / BEGUN
        self.group = WorkerGroup[Rank]("actor", timeout=TIMEOUT)
        for slot in self.slots:
            self.group.add(slot, partial(Rank, slot.rank, self.ranks, str(folder)), {}, gpus=0)
        started = self.group.start(Rank.pid)
        self.pids = self.group.wait(started)
        self.watch.ready([call.asked for call in started])
        for phase in MEETING + ALONE:
            self.run(phase)

    def run(self, phase: str) -> None:
        self.group.call(getattr(Rank, phase))

    def restart(self) -> None:
        for worker in self.group.workers:
            ray.kill(worker.handle)
        self.start()

    def address(self, rank: int) -> str:
        return self.slots[rank].node.address


@contextmanager
def job_of(folder: Path, ranks: int, stall_seconds: float) -> Iterator[Job]:
    """A job on a cluster of one node, whose stalls are logged."""
    said, watch = Lines(), Releasing(stall_seconds, FULL_DISK if FULL_DISK.is_dir() else folder)
    watching.logger.addHandler(said)
    try:
        with ray_node(), calls.watched(watch):
            yield Job(folder, ranks, watch, said)
    finally:
        watching.logger.removeHandler(said)


def inject(job: Job, injection: Injection) -> list[str]:
    """Injects a fault and waits for the explanation and for the end of the phase: what the run said of it.

    Raises AssertionError if something else took too long before the fault began.
    """
    for phase in injection.healthy:
        job.run(phase)
    job.begun.unlink(missing_ok=True)
    job.watch.explained = 0.0
    job.said.lines.clear()
    if injection.fault.at == "controller":
        _stall_the_controller(job, injection)
        return list(job.said.lines)
    job.group.call_one(injection.rank, Rank.arm, injection.fault.act, injection.round)
    begun: list[bool] = []

    def release() -> None:
        begun.append(job.begun.exists())
        _release(job, injection)

    job.watch.release = release
    died = ""
    try:
        job.run(injection.phase)
    except WorkerError as error:
        died = str(error)
    finally:
        job.watch.release = lambda: None
    lines = list(job.said.lines)
    if died:
        lines = [died, *lines] if injection.fault.act == "die" else [*lines, died]
    if died or False in begun:
        job.restart()
    assert False not in begun, f"a stall was explained before the fault began: {lines}"
    return lines


def _stall_the_controller(job: Job, injection: Injection) -> None:
    path = job.begun.with_name(f"fifo-{injection.seed}-{injection.fault.act}")
    os.mkfifo(path)
    job.watch.release = partial(let_go, path)
    end = time.monotonic() + TIMEOUT
    with job.watch.waiting():  # the controller's time begins when its last wait ends
        pass
    with job.watch.controller(TIMEOUT):
        CONTROLLER_FAULTS[injection.fault.act](path, lambda: job.watch.explained > 0 or time.monotonic() > end)
    job.watch.release = lambda: None


def read_a_fifo(path: Path, _ended: Callable[[], bool]) -> None:
    """Waits for the writer, which `let_go` is."""
    path.read_text()


def loop(_path: Path, ended: Callable[[], bool]) -> None:
    while not ended():
        pass


CONTROLLER_FAULTS = {"read_a_fifo": read_a_fifo, "loop": loop}


def let_go(path: Path) -> None:
    """Ends the reader's wait; without a reader there is nothing to end."""
    with suppress(OSError):
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))


def _release(job: Job, injection: Injection) -> None:
    """Ends a rank's fault."""
    if injection.fault.act == "skip_a_collective":
        job.group.start_one(injection.rank, Rank.meet)
        return
    with suppress(ProcessLookupError):
        os.kill(job.pids[injection.rank], injection.fault.release)
