"""One process that saves after every step (`tests.chaos.counting --alone`), at most 5 ms apart: most faults hit a save.

After every fault the run is started again. It has to continue with the step after its last checkpoint, and to leave
nothing behind when it is stopped.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

from benchmarks.two_nodes import REPOSITORY
from tests.chaos.counting import rows_of
from tests.chaos.injection import Injection, Kind, NotStartedError, first_line
from trainer.errors import CheckpointError
from trainer.records.files.owner import OWNER
from trainer.runs.checkpoints.checkpoint import last_checkpoint, read_checkpoint

PATIENCE = 120.0
MORE_STEPS = 3


class Run:
    """A run in this directory."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.log = run_dir.parent / "log"
        self.rows_before = len(rows_of(run_dir))
        self.clock = run_dir.parent / "clock"
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.counting", str(run_dir), "--alone", "--clock", str(self.clock)],
                env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
                cwd=REPOSITORY,
                stdout=output,
                stderr=output,
            )

    def steps(self) -> list[int]:
        return [row["step"] for row in rows_of(self.run_dir)[self.rows_before :]]

    def wait_for_steps(self, count: int) -> None:
        deadline, wanted = time.monotonic() + PATIENCE, len(self.steps()) + count
        while len(self.steps()) < wanted:
            if time.monotonic() > deadline or self.process.poll() is not None:
                self.process.kill()
                raise NotStartedError(f"no {count} steps: {self.log.read_text()}")
            time.sleep(0.005)

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(PATIENCE)


Fault = Callable[[Random, Injection, Run], None]


def inject(fault: Fault, random: Random, injection: Injection) -> None:
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
        run_dir = Path(directory) / "run"
        run = Run(run_dir)
        run.wait_for_steps(2)
        time.sleep(random.uniform(0, 0.3))
        fault(random, injection, run)
        recorded = rows_of(run_dir)[-1]["step"]
        injection.moment = f"step {recorded}"
        saved = saved_step(run_dir, injection)
        injection.steps_lost = max(0, recorded - saved)
        again = Run(run_dir)
        again.wait_for_steps(MORE_STEPS)
        injection.expect(again.steps()[0] == saved + 1, f"went on with step {again.steps()[0]} instead of {saved + 1}")
        status = again.end(signal.SIGTERM)
        injection.expect(status == 143, f"exit code {status} instead of 143: {again.log.read_text()}")
        row = rows_of(run_dir)[-1]
        injection.expect(row["totals"] == [row["step"] * (row["step"] + 1) // 2], f"wrong total: {row}")
        hidden = [path for path in (run_dir / "checkpoints").iterdir() if path.name.startswith(".")]
        injection.files = len(hidden) + (run_dir / OWNER).exists()
        injection.processes = 0
    injection.expect_clean()


def saved_step(run_dir: Path, injection: Injection) -> int:
    """The step of the last checkpoint."""
    try:
        last = last_checkpoint(run_dir)
        injection.readable = last is not None
        return read_checkpoint(last).step if last else 0
    except CheckpointError as error:
        injection.readable = False
        injection.problems.append(str(error))
        return 0


def killed(_: Random, injection: Injection, run: Run) -> None:
    run.end(signal.SIGKILL)
    injection.cause = None


def stopped(random: Random, injection: Injection, run: Run) -> None:
    began = time.monotonic()
    number = random.choice([signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
    injection.exits = [run.end(number)]
    injection.detected = injection.ended = round(time.monotonic() - began, 3)
    injection.expect(injection.exits == [128 + number], f"exit code {injection.exits} after {number.name}")
    injection.cause = first_line(f"error: stopped by {number.name}", run.log.read_text())


def second_run(random: Random, injection: Injection, run: Run) -> None:
    """Another run starts in the same directory; the first one goes on."""
    began = time.monotonic()
    command = [sys.executable, "-m", "tests.chaos.counting", str(run.run_dir), "--alone"]
    other = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE, check=False)
    injection.detected = round(time.monotonic() - began, 3)
    injection.exits = [other.returncode]
    injection.expect(other.returncode == 2, f"exit code {other.returncode} instead of 2: {other.stderr}")
    injection.cause = first_line(f"process {run.process.pid} .*writes into this directory", other.stderr)
    run.wait_for_steps(MORE_STEPS)
    steps = run.steps()
    injection.expect(steps == list(range(steps[0], steps[-1] + 1)), f"steps {steps}")
    run.end(signal.SIGTERM)


def clock_jump(random: Random, injection: Injection, run: Run) -> None:
    """The clock of the run's process is set forward or back, up to a day."""
    run.clock.write_text(str(random.choice((-1, 1)) * random.uniform(1, 86400)))
    run.wait_for_steps(MORE_STEPS)
    injection.cause = None  # nothing is wrong with the run
    if random.random() < 0.5:
        run.clock.unlink()
        run.wait_for_steps(MORE_STEPS)
    injection.exits = [run.end(signal.SIGTERM)]
    injection.expect(injection.exits == [143], f"exit code {injection.exits}: {run.log.read_text()}")


KINDS = (
    Kind("one process killed while it saves", partial(inject, killed)),
    Kind("one process stopped while it saves", partial(inject, stopped)),
    Kind("two runs in one directory", partial(inject, second_run)),
    Kind("clock jump, faked in one process", partial(inject, clock_jump)),
)
