"""A run without a model: `python -m tests.chaos.counting RUN_DIRECTORY`, on the Ray cluster at RAY_ADDRESS.

A worker on every node adds up the numbers of the steps, and each step is saved. Workers, checkpoints, the owner of the
directory and the stop signal are the trainer's own. Without torch, a run starts and ends within seconds.
"""

import json
import logging
import os
import sys
import time
from pathlib import Path

from trainer.cluster.nodes import connected, find_nodes, reserve_slots
from trainer.cluster.workers import WorkerGroup
from trainer.errors import InterruptedRun, TrainerError
from trainer.records.files.checksums import sha256
from trainer.records.files.owner import RunOwner
from trainer.runs.checkpoint import CheckpointWriter, TrainingState, fingerprint, last_checkpoint, read_checkpoint
from trainer.runs.stop_signal import StopSignal

STEP_SECONDS = 0.05
TIMEOUT = 10.0  # of a call to a worker
START_TIMEOUT = 60.0
METRICS = "metrics.jsonl"


class Counter:
    """The sum of all steps, on one node."""

    def __init__(self) -> None:
        self.total = 0

    def add(self, step: int) -> int:
        time.sleep(STEP_SECONDS)
        self.total += step
        return self.total

    def save(self, directory: Path, rank: int) -> dict[str, str]:
        """Writes the sum; the file's checksum."""
        directory.mkdir(exist_ok=True)
        file = directory / f"{rank}.json"
        file.write_text(str(self.total))
        return {f"{directory.name}/{file.name}": sha256(file)}

    def load(self, directory: Path, rank: int) -> None:
        self.total = int((directory / f"{rank}.json").read_text())


def count(run_dir: Path) -> None:
    """Counts until it is stopped. Raises TrainerError."""
    model = run_dir.parent
    with RunOwner(run_dir) as owner, StopSignal(owner.check) as stop:
        last = last_checkpoint(run_dir)
        step = read_checkpoint(last, model).step if last else 0
        with connected():
            slots = reserve_slots(find_nodes(None, 0), 0, START_TIMEOUT)
            group = WorkerGroup[Counter]("actor", START_TIMEOUT)
            for slot in slots:
                group.add(slot, Counter, {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}, 0.0)
            for rank in range(len(group)):
                if last:
                    group.call_one(rank, Counter.load, last / "actor", rank)
            group.timeout = TIMEOUT
            stop.defer()
            writer = CheckpointWriter(run_dir, keep=3)
            try:
                while True:
                    step += 1
                    totals = group.call(Counter.add, step)
                    with (run_dir / METRICS).open("a") as metrics:
                        metrics.write(json.dumps({"step": step, "totals": totals, "process": os.getpid()}) + "\n")
                    save(
                        group, writer, TrainingState(step=step, seed=0, sampler={}, model=fingerprint(model), config={})
                    )
                    stop.check()
            except InterruptedRun as error:
                raise InterruptedRun(error.number, f" after step {step}") from error
            finally:
                writer.abandon()


def save(group: WorkerGroup[Counter], writer: CheckpointWriter, state: TrainingState) -> None:
    directory = writer.begin(state) / "actor"
    sums = group.wait([group.start_one(rank, Counter.save, directory, rank) for rank in range(len(group))])
    writer.complete({name: own for found in sums for name, own in found.items()})


def main() -> int:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        count(Path(sys.argv[1]).resolve())
    except TrainerError as error:
        sys.stderr.write(f"error: {error}\n" + (f"\nhint: {error.hint}\n" if error.hint else ""))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
