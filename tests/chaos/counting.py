"""A run without a model: `python -m tests.chaos.counting RUN_DIRECTORY [--alone]`.

A worker on every node of the Ray cluster at RAY_ADDRESS adds up the numbers of the steps, and every step is saved; with
--alone, this process is the only worker. Workers, checkpoints, records, the owner of the directory and the stop signal
are the trainer's own. Without torch, a run starts and ends within seconds.
"""

import argparse
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from tests.json_lines import read_rows
from tests.training_state import training_state
from trainer.cluster.ending import leave
from trainer.errors import CheckpointError, InterruptedRun, TrainerError
from trainer.records.files.checksums import sha256
from trainer.records.files.lines import LineFile
from trainer.records.files.owner import RunOwner
from trainer.runs.checkpoints.checkpoint import CheckpointWriter, last_checkpoint, read_checkpoint
from trainer.runs.stop_signal import StopSignal

STEP_SECONDS, ALONE_SECONDS = 0.05, 0.005
TIMEOUT = 10.0  # of a call to a worker
START_TIMEOUT = 60.0
METRICS = "metrics.jsonl"


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    """The finished rows of a run's metrics."""
    return read_rows(run_dir / METRICS)


class Counter:
    """The sum of all steps, on one node."""

    def __init__(self, seconds: float) -> None:
        self.total, self.seconds = 0, seconds

    def add(self, step: int) -> int:
        time.sleep(self.seconds)
        self.total += step
        return self.total

    def save(self, directory: Path, rank: int) -> dict[str, str]:
        """Writes the sum; the file's checksum. Raises CheckpointError."""
        file = directory / f"{rank}.json"
        try:
            directory.mkdir(exist_ok=True)
            file.write_text(str(self.total).rjust(4096))
            return {f"{directory.name}/{file.name}": sha256(file)}
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be written: {error}") from error

    def load(self, directory: Path, rank: int) -> None:
        self.total = int((directory / f"{rank}.json").read_text())


class Counters(Protocol):
    """The counters of all ranks."""

    def add(self, step: int) -> list[int]: ...
    def save(self, directory: Path) -> dict[str, str]: ...
    def load(self, directory: Path) -> None: ...


class OneCounter:
    def __init__(self) -> None:
        self._counter = Counter(ALONE_SECONDS)

    def add(self, step: int) -> list[int]:
        return [self._counter.add(step)]

    def save(self, directory: Path) -> dict[str, str]:
        return self._counter.save(directory, 0)

    def load(self, directory: Path) -> None:
        self._counter.load(directory, 0)


@contextmanager
def on_every_node() -> Iterator[Counters]:
    """A counter on every node of the Ray cluster."""
    from trainer.cluster.connection import connected
    from trainer.cluster.nodes import find_nodes, reserve_slots
    from trainer.cluster.workers import WorkerGroup

    class OnEveryNode:
        def __init__(self) -> None:
            self.group = WorkerGroup[Counter]("actor", TIMEOUT)

        def add(self, step: int) -> list[int]:
            return self.group.call(Counter.add, step)

        def save(self, directory: Path) -> dict[str, str]:
            ranks = range(len(self.group))
            by_rank = self.group.wait([self.group.start_one(rank, Counter.save, directory, rank) for rank in ranks])
            return {name: total for sums in by_rank for name, total in sums.items()}

        def load(self, directory: Path) -> None:
            for rank in range(len(self.group)):
                self.group.call_one(rank, Counter.load, directory, rank)

    with connected():
        counters = OnEveryNode()
        for slot in reserve_slots(find_nodes(None, 0), 0, START_TIMEOUT):
            environment = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
            counters.group.add(slot, lambda: Counter(STEP_SECONDS), environment, 0.0)
        counters.group.timeout = START_TIMEOUT
        counters.add(0)
        counters.group.timeout = TIMEOUT
        yield counters


@contextmanager
def alone() -> Iterator[Counters]:
    yield OneCounter()


def count(run_dir: Path, in_one_process: bool) -> None:
    """Counts until it is stopped. Raises TrainerError."""
    with RunOwner(run_dir) as owner, StopSignal(owner.check) as stop:
        last = last_checkpoint(run_dir)
        step = read_checkpoint(last).step if last else 0
        with alone() if in_one_process else on_every_node() as counters:
            if last:
                counters.load(last / "actor")
            stop.defer()
            writer, metrics = CheckpointWriter(run_dir, keep=3), LineFile(run_dir / METRICS)
            try:
                while True:
                    step += 1
                    metrics.append({"step": step, "totals": counters.add(step)})
                    save(counters, writer, step)
                    stop.check()
            except InterruptedRun as error:
                raise InterruptedRun(error.number, f" after step {step}") from error
            finally:
                metrics.close()
                writer.abandon()


def save(counters: Counters, writer: CheckpointWriter, step: int) -> None:
    """Writes a checkpoint; a failure is reported, and the run goes on."""
    try:
        directory = writer.begin(training_state(step)) / "actor"
        writer.complete(counters.save(directory))
    except CheckpointError as error:
        writer.abandon()
        logging.warning("no checkpoint of step %d: %s", step, error)


def set_clock(file: Path) -> None:
    """Fakes `time.time` of this process: it is wrong by the seconds in the file, while there is one."""
    right = time.time

    def wrong() -> float:
        try:
            return right() + float(file.read_text() or 0)
        except FileNotFoundError:
            return right()

    time.time = wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.counting", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--clock", type=Path, metavar="FILE", help="seconds by which `time.time` is wrong")
    given = parser.parse_args()
    if given.clock:
        set_clock(given.clock)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        count(given.run_dir.resolve(), given.alone)
    except TrainerError as error:
        sys.stderr.write(f"error: {error}\n" + (f"\nhint: {error.hint}\n" if error.hint else ""))
        return error.exit_code
    return 0


if __name__ == "__main__":
    leave(main())
