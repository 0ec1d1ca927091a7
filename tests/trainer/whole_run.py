"""Whole runs of the trainer in processes of their own, as a user starts them."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.json_lines import read_rows
from trainer.runs.reproduction.verify import verify

ROOT = Path(__file__).parents[2]
TRAINER = ("-m", "trainer")
DEADLINE = 240.0
USE = ("gpu/", "mfu/", "tflops/", "engines/", "waiting/", "idle/")
NOT_RESULTS = ("time/", "throughput/", "memory/", "wall_time", "trainer/", "rollout/repairs", "reward/repairs", *USE)


@dataclass
class Runs:
    """Starts `python -m trainer train` on a cluster of two nodes; every run has its own directory."""

    address: str
    directory: Path
    model: Path
    data: list[Path]

    def start(self, run_id: str, *overrides: str, program: Sequence[str] = TRAINER) -> "Run":
        settings = {
            "model.path": self.model,
            "data.train_files": self.data[0],
            "data.validation_files": self.data[1],
            "data.max_prompt_length": 128,
            "data.train_batch_size": 8,
            "rollout.samples_per_prompt": 2,
            "rollout.kv_cache_gib": 0.1,
            "rollout.compare_freq": 1,
            "actor.learning_rate": 3e-4,
            "critic.learning_rate": 1e-3,
            "actor.mini_batch_size": 8,
            "critic.mini_batch_size": 8,
            # A random model earns no reward: let entropy and KL give it something to learn from.
            "actor.entropy_coefficient": 0.1,
            "algorithm.kl_coefficient": 0.1,
            "trainer.output_dir": self.directory,
            "trainer.test_freq": 2,
        }
        return self.launch("train", run_id, settings, *overrides, program=program)

    def launch(
        self, command: str, run_id: str, settings: Mapping[str, object], *more: str, program: Sequence[str] = TRAINER
    ) -> "Run":
        """Starts `python -m trainer COMMAND` with these settings, or another program with the same arguments."""
        arguments = [*(f"{key}={value}" for key, value in settings.items()), f"trainer.run_id={run_id}", *more]
        return self.python([*program, command, *arguments], run_id)

    def replay(self, run: "Run", *options: str, program: Sequence[str] = TRAINER) -> "Run":
        """A replay of a run that verifies and repeats to the bit, once it has ended."""
        assert verify(run.directory) == []
        replayed = self.python([*program, "replay", str(run.directory), *options], f"{run.directory.name}-replay")
        replayed.succeed()  # the exit status is 0 only if metrics and weights are equal
        return replayed

    def python(self, arguments: Sequence[str], run_id: str) -> "Run":
        """Starts a Python process on the cluster that writes into the directory of this run."""
        environment = {**os.environ, "RAY_ADDRESS": self.address}
        process = subprocess.Popen(
            [sys.executable, *arguments], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
        )
        return Run(process, self.directory / run_id)


@dataclass
class Run:
    process: "subprocess.Popen[str]"
    directory: Path

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + DEADLINE
        while time.monotonic() < deadline:
            if any(row["step"] >= step for row in self.metrics()):
                return
            assert self.process.poll() is None, self.process.communicate()[1]
            time.sleep(0.1)
        raise AssertionError(f"no step {step} within {DEADLINE} s")

    def end(self) -> tuple[int, str]:
        """Exit status and standard error."""
        _, errors = self.process.communicate(timeout=DEADLINE)
        return self.process.returncode, errors

    def succeed(self) -> str:
        """Its standard error, once it has ended well."""
        status, errors = self.end()
        assert status == 0, errors
        return errors

    def metrics(self) -> list[dict[str, float]]:
        """The finished lines of metrics.jsonl."""
        return read_rows(self.directory / "metrics.jsonl")

    def results(self, step: int) -> dict[str, float]:
        """A step's metrics that depend on nothing but the settings."""
        (row,) = (row for row in self.metrics() if row["step"] == step)
        return {k: v for k, v in row.items() if not k.startswith(NOT_RESULTS)}


def workers_of(runs: Runs, title: str) -> Iterator[psutil.Process]:
    """Processes of this test's cluster with such a title, waited for; others may run on this machine.

    Ray calls a worker's process after its class, and adds `.call` as long as it is at work.
    """
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        yield from (process for process in psutil.process_iter() if is_worker(process, title, runs.address))
        time.sleep(0.01)
    raise AssertionError(f"no process {title}")


def is_worker(process: psutil.Process, title: str, address: str) -> bool:
    try:
        raylet = process.parent()
        return (
            process.cmdline()[:1] != []
            and process.cmdline()[0].startswith(f"ray::{title}")
            and raylet is not None
            and any(address in word for word in raylet.cmdline())
        )
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
