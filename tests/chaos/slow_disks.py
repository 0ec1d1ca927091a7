"""A slow disk under a real run that saves after every step: a loop device whose writes the kernel limits.

The run is a container of the cpu image with a limit on the device (`docker run --device-write-bps`). The disk needs
longer for a checkpoint than the run for a step. Needs root, a control group `blkio` or `io`, and a Docker engine.
"""

import json
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from benchmarks.two_nodes import REPOSITORY
from tests.chaos.injection import Injection, Kind, NotStartedError, first_line
from trainer.errors import CheckpointError
from trainer.runs.checkpoints.checkpoint import checkpoint_step, last_checkpoint

IMAGE = "slipway:cpu"
SIZE = "512M"
RATE = (2**17, 2**19)
"""Bytes a second; a checkpoint has 6 MiB."""
STEPS = 8
PATIENCE = 600.0
WAITS = r"checkpoint of step \d+ is still being written, so that of step \d+ waits"


@contextmanager
def slow_disk(directory: Path) -> Iterator[tuple[str, Path]]:
    """An ext4 file system on a loop device; the device and where it is mounted."""
    file, mounted = directory / "disk", directory / "mounted"
    mounted.mkdir()
    run("truncate", "--size", SIZE, str(file))
    run("mkfs.ext4", "-q", str(file))
    run("mount", "-o", "loop", str(file), str(mounted))
    try:
        yield run("findmnt", "--noheadings", "--output", "SOURCE", str(mounted)), mounted
    finally:
        run("umount", str(mounted))  # frees the loop device, too


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def inject(random: Random, injection: Injection) -> None:
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory, slow_disk(Path(directory)) as (device, disk):
        rate, run_dir, log = random.randint(*RATE), disk / "run", Path(directory) / "log"
        injection.moment = f"{rate / 2**20:.2f} MiB/s"
        train(disk, STEPS, log, injection, run_dir, ("--device-write-bps", f"{device}:{rate}"))
        injection.cause = first_line(WAITS, log.read_text())
        recorded = [row["step"] for row in rows_of(run_dir)]
        injection.expect(recorded == list(range(1, STEPS + 1)), f"recorded {recorded}")
        postponed = sum(row.get("checkpoint/postponed", 0) for row in rows_of(run_dir))
        injection.expect(postponed > 0, "no checkpoint is counted as postponed")
        failed = sum(row.get("checkpoint/failed", 0) for row in rows_of(run_dir))
        injection.expect(not failed, f"{failed:.0f} checkpoints failed")
        try:
            last = last_checkpoint(run_dir)
            injection.readable = last is not None
            injection.steps_lost = STEPS - checkpoint_step(last) if last else STEPS
        except CheckpointError as error:
            injection.readable = False
            injection.problems.append(str(error))
        status = train(disk, STEPS + 1, log, None, run_dir)
        injection.expect(status == 0, f"the next start ended with {status}: {log.read_text()[-2000:]}")
        steps = [row["step"] for row in rows_of(run_dir)][STEPS:]
        injection.expect(steps == [STEPS + 1], f"the next start recorded {steps}")
        injection.files = sum(path.name.startswith(".") for path in (run_dir / "checkpoints").iterdir())
    injection.expect_clean()


def train(
    disk: Path, steps: int, log: Path, injection: Injection | None, run_dir: Path, options: tuple[str, ...] = ()
) -> int:
    """Trains in a container; the exit status. Notes how long after the first save the log says that the next waits."""
    command = ["docker", "run", "--rm", "--init", "--shm-size", "1g", *options, "-v", f"{disk}:{disk}"]
    command += ["-v", f"{REPOSITORY}:/checkout:ro", "-e", "PYTHONPATH=/checkout", "--entrypoint", "launch", IMAGE]
    command += ["--", "python", "-m", "tests.cluster.training", str(disk), str(steps)]
    began = time.monotonic()
    saving: float | None = None
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            while process.poll() is None:
                now = time.monotonic()
                if now > began + PATIENCE:
                    raise NotStartedError(f"a run of {steps} steps takes longer: {log.read_text()[-2000:]}")
                if saving is None and any((run_dir / "checkpoints").glob(".*")):
                    saving = now
                if injection and saving and injection.detected is None and first_line(WAITS, log.read_text()):
                    injection.detected = round(now - saving, 2)
                time.sleep(0.02)
        finally:
            process.terminate()
    if injection:
        if process.returncode and not rows_of(run_dir):
            raise NotStartedError(f"no step: {log.read_text()[-2000:]}")
        injection.exits = [process.returncode]
        injection.expect(injection.exits == [0], f"exit code {injection.exits}: {log.read_text()[-2000:]}")
    return process.returncode


def rows_of(run_dir: Path) -> list[dict[str, float]]:
    file = run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [row for row in rows if row["step"] > 0]  # without the validation before the first step


KINDS = (Kind("disk slower than the steps, real run", inject),)
