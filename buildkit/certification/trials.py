"""Runs an image on this machine for a certificate: its smoke tests, its speed check, and a short PPO run."""

import json
import time
from abc import ABC, abstractmethod
from pathlib import Path

from buildkit.certification.certificate import FAILED, NOT_DONE, PASSED, Part
from buildkit.certification.judge import COLLECTIVES, DEVICES, TRAINING, failed, judge_devices, judge_training
from buildkit.host.machine import Machine
from buildkit.images.test import run_container_tests
from buildkit.running.engine import ContainerEngine
from buildkit.running.flags import RunRequest, caller
from buildkit.running.nodes import ending, run_nodes
from buildkit.running.short_run import STEPS, short_run

REPORT = "measured.json"  # of the speed check
STDERR = 2
LIMIT = 480  # seconds for the training run, with its start
TOTAL = 15 * 60  # seconds for all trials
SHORTEST = 30  # seconds without which no trial starts
SMOKE = "smoke tests"


class Trial(ABC):
    """Starts `launch` on this machine. `folder` is empty at first; `gpus` is 0 for a rehearsal on CPU.

    `total` are the seconds for all trials, from now on.
    """

    def __init__(self, folder: Path, gpus: int, total: float = TOTAL) -> None:
        self.folder = folder
        self.gpus = gpus
        self._deadline = time.monotonic() + total

    @property
    def seconds_left(self) -> int:
        return max(0, int(self._deadline - time.monotonic()))

    @property
    def ranks(self) -> int:
        """Two, if the machine has two GPUs; on CPU, two nodes are two ranks."""
        return min(self.gpus, 2) if self.gpus else 2

    @property
    @abstractmethod
    def place(self) -> str:
        """The folder's path for the commands."""

    @abstractmethod
    def run(self, command: tuple[str, ...], nodes: int = 1, gpus: int | None = None) -> int:
        """The status of `launch` with this command on so many GPUs, all by default. Its output goes to stderr.

        `TIMED_OUT` if it did not end in the seconds that were left.
        """


class ContainerTrial(Trial):
    """Starts it in containers of an image."""

    place = "/certify"

    def __init__(
        self, folder: Path, gpus: int, image: str, target: str, engine: ContainerEngine, machine: Machine
    ) -> None:
        super().__init__(folder, gpus)
        self.image, self.target, self.engine, self.machine = image, target, engine, machine

    def run(self, command: tuple[str, ...], nodes: int = 1, gpus: int | None = None) -> int:
        request = RunRequest(
            image=self.image,
            target=self.target,
            command=command,
            nodes=nodes,
            volumes=(f"{self.folder}:{self.place}",),
            environment=(f"SLIPWAY_REPORT_DIR={self.place}",),
            user=caller(),
            gpus=gpus,
        )
        return run_nodes(self.engine, request, self.machine, STDERR, self.seconds_left)


def smoke(root: Path, target: str, image: str, arguments: tuple[str, ...], limit: int) -> list[Part]:
    """The smoke tests of an image. `arguments` for pytest select some of them, which is not the whole part."""
    started = time.monotonic()
    status = run_container_tests(root, target, image, ("smoke",), arguments, STDERR, limit)
    figures = {"seconds": round(time.monotonic() - started, 1)}
    if status != 0:
        return [Part(SMOKE, FAILED, f"pytest {ending(status, limit)}", figures)]
    if arguments:
        return [Part(SMOKE, NOT_DONE, f"only a selection ran, and passed: {' '.join(arguments)}", figures)]
    return [Part(SMOKE, PASSED, "", figures)]


def devices(trial: Trial) -> list[Part]:
    """The speed of every device of this machine, and of their collectives."""
    limit = trial.seconds_left
    status = trial.run(("preflight", "--speed"))
    report = trial.folder / REPORT
    if not report.is_file():
        return failed((DEVICES, COLLECTIVES), f"`launch preflight --speed` {ending(status, limit)}")
    return judge_devices(json.loads(report.read_text()), bool(trial.gpus))


def training(trial: Trial) -> list[Part]:
    """A short PPO run of two ranks, if this machine has room for two."""
    nodes = 1 if trial.gpus else trial.ranks
    gpus = trial.ranks if trial.gpus else None
    limit = min(LIMIT, trial.seconds_left)
    status = trial.run(short_run(trial.place, trial.ranks, bool(trial.gpus), limit), nodes, gpus)
    if status != 0:
        return failed(TRAINING, f"the run {ending(status, limit)}")
    return judge_training(read_metrics(trial.folder / "runs" / "ppo" / "metrics.jsonl"), STEPS, trial.ranks, bool(gpus))


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The metrics of each step, without the row of the start."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row for row in rows if row["step"] > 0]


def device_names(trial: Trial) -> list[str]:
    """The devices of the speed check, as torch calls them; empty if there was none."""
    report = trial.folder / REPORT
    return [device["name"] for device in json.loads(report.read_text())["devices"]] if report.is_file() else []
