"""The soak itself: jobs of two nodes that train, are broken, and start again."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random

from benchmarks.two_nodes import REPOSITORY
from tests.chaos.counting import rows_of
from tests.chaos.injection import NotStartedError
from tests.chaos.jobs import Fault, Job
from tests.soak.samples import sample

MODES = ("synchronous", "one_step_off", "asynchronous")
SAMPLE_SECONDS = 10.0
CACHES = re.compile("torchinductor_")  # what stays in /tmp on purpose
WRONG_USAGE = 2
PATIENCE = 900.0
"""Seconds for a whole job without faults to take its next step; then the soak has failed."""
SETTINGS = (
    "actor.learning_rate=5e-5",
    "critic.learning_rate=1e-3",
    "algorithm.correction=tis",
    "rollout.timeout=60",
    "trainer.test_freq=-1",
    "trainer.save_freq=20",
    "trainer.keep_checkpoints=2",
    "trainer.resume=auto",
)


def prepare(directory: Path) -> list[str]:
    """Writes data and a model that adds badly, unless they are there; the settings of every run."""
    data, model = directory / "data", directory / "warm-start"
    if not (model / "config.json").exists():
        trainer = [sys.executable, "-m", "trainer"]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        make = [*trainer, "data", "arithmetic", "--output", str(data), "--seed", "0"]
        subprocess.run(make, check=True, env=environment)
        files = (f"train_files={data}/demonstrations.parquet", f"validation_files={data}/validation.parquet")
        subprocess.run([*trainer, "sft", *files, f"output={model}", "seed=0"], check=True, env=environment)
    files = (f"data.train_files={data}/train.parquet", f"data.validation_files={data}/validation.parquet")
    return [*files, f"model.path={model}", f"trainer.output_dir={directory}", *SETTINGS]


class Soak:
    """Writes `samples.jsonl` and `events.jsonl`, and a folder per run, into a directory."""

    def __init__(self, directory: Path, settings: Sequence[str]) -> None:
        self.directory = directory
        self._settings = settings

    def disturbed(self, mode: str, seconds: float, fault_every: float, faults: Sequence[Fault], first: int) -> None:
        """Trains in this mode for so long, with a fault at a time; the first one is number `first`."""
        end = time.monotonic() + seconds
        self._next_fault = time.monotonic() + fault_every
        self._faults = iter([*faults[first:], *faults] * 1000)
        while time.monotonic() < end:
            with self._job(mode, steps=10**6) as job:
                self._watch(job, mode, end, fault_every)
                self._look_back(job, mode)

    def undisturbed(self, mode: str, steps: int) -> None:
        """The same run from the beginning, without faults."""
        name = f"{mode}-undisturbed"
        with self._job(name, steps, mode) as job:
            deadline = time.monotonic() + PATIENCE + 60 * steps
            while not ended(job) and time.monotonic() < deadline:
                time.sleep(1)
            self._look_back(job, name)

    def _job(self, name: str, steps: int, mode: str = "") -> Job:
        settings = (f"trainer.run_id={name}", f"trainer.mode={mode or name}", f"trainer.total_steps={steps}")
        command = [sys.executable, "-m", "trainer", "train", *self._settings, *settings]
        return Job(self.directory / name, 2, command)

    def _watch(self, job: Job, mode: str, end: float, fault_every: float) -> None:
        """Samples the job until it ends, injects faults when it is time, and stops it at the end."""
        began, wall = time.monotonic(), time.time()
        while not (steps := steps_since(job.run_dir, wall)):
            if ended(job) or time.monotonic() > began + PATIENCE:
                self._note(mode, "not started")
                if any(node.process.poll() == WRONG_USAGE for node in job.nodes):
                    raise ValueError("\n".join(node.output() for node in job.nodes))
                return
            time.sleep(0.5)
        stretch = time.monotonic()
        self._note(mode, "started", step=steps[0], seconds=round(stretch - began, 1))
        while not ended(job):
            now = time.monotonic()
            if now >= end:
                os.kill(job.nodes[0].process.pid, 15)
                self._wait_for_end(job)
            elif now >= self._next_fault:
                fault, self._next_fault = next(self._faults), now + fault_every
                self._strike(job, mode, fault)
                stretch = time.monotonic()
            else:
                row = sample(job.left(set()), job.new_files(set()))
                self._write("samples", {"mode": mode, "stretch": stretch, "seconds": now, **row})
                time.sleep(SAMPLE_SECONDS)

    def _strike(self, job: Job, mode: str, fault: Fault) -> None:
        """Injects a fault, and waits until the job has ended or taken two more steps."""
        began, wall = time.monotonic(), time.time()
        try:
            fault.strike(job, Random(began))
        except NotStartedError as error:  # the job has just ended, or the process is being replaced
            self._note(mode, f"not injected: {fault.name}", cause=str(error)[:100])
            return
        if fault.exits:
            self._wait_for_end(job)
        while not ended(job) and len(steps_since(job.run_dir, wall)) < 2 and time.monotonic() < began + PATIENCE:
            time.sleep(0.2)
        self._note(mode, fault.name, seconds=round(time.monotonic() - began, 1))

    def _wait_for_end(self, job: Job) -> None:
        for node in job.nodes:
            with suppress(subprocess.TimeoutExpired):
                node.process.wait(PATIENCE)

    def _look_back(self, job: Job, name: str) -> None:
        """What an ended job leaves."""
        self._wait_for_end(job)
        time.sleep(5)
        exits = [node.process.poll() for node in job.nodes]
        killed = {rank for rank, status in enumerate(exits) if status == -signal.SIGKILL}
        files = [str(path) for path in job.new_files(killed) if not CACHES.match(path.name)]
        left = len(job.left(set()))
        with (self.directory / f"{name}.log").open("a") as log:
            log.write("\n".join(node.output() for node in job.nodes))
        self._note(name, "ended", exits=exits, processes=left, files=files)

    def _note(self, mode: str, event: str, **values: object) -> None:
        self._write("events", {"mode": mode, "event": event, "time": round(time.time()), **values})

    def _write(self, file: str, row: object) -> None:
        with (self.directory / f"{file}.jsonl").open("a") as lines:
            lines.write(json.dumps(row) + "\n")


def ended(job: Job) -> bool:
    """Whether a node has ended; the others follow."""
    return any(node.process.poll() is not None for node in job.nodes)


def steps_since(run_dir: Path, wall_time: float) -> list[int]:
    """The steps recorded after a time."""
    return [int(str(row["step"])) for row in rows_of(run_dir) if float(str(row["wall_time"])) > wall_time]
