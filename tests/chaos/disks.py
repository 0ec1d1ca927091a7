"""A disk that fills up or becomes read-only, and memory that runs out, under one process that saves after every step.

The disk is a small tmpfs that is mounted for the run, the limit of memory a control group: both need root.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random

from benchmarks.two_nodes import REPOSITORY
from tests.chaos.counting import rows_of
from tests.chaos.injection import Injection, Kind, NotStartedError, first_line
from tests.chaos.processes import PATIENCE, Run, saved_step

SIZE = "512k"
LIMIT = 2**28  # bytes of memory
CGROUPS = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


def inject(fault: Callable[[Path], None], repair: Callable[[Path], None], random: Random, injection: Injection) -> None:
    """Takes the disk away for a moment, while the run goes on."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
        run_dir = Path(directory) / "run"
        disk = run_dir / "checkpoints"
        disk.mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "none", str(disk)], check=True)
        try:
            run = Run(run_dir)
            run.wait_for_steps(2)
            time.sleep(random.uniform(0, 0.3))
            injection.moment = f"step {run.steps()[-1]}"
            began = time.monotonic()
            fault(disk)
            wait_for(lambda: named(run), "message")
            injection.detected = round(time.monotonic() - began, 3)
            injection.cause = named(run)
            time.sleep(random.uniform(0, 0.3))
            saved_step(run_dir, injection)  # the one from before the fault
            repair(disk)
            repaired = run.steps()[-1]
            run.wait_for_steps(5)
            injection.exits = [run.end(15)]
            injection.expect(injection.exits == [143], f"exit code {injection.exits}: {run.log.read_text()}")
            recorded = [row["step"] for row in rows_of(run_dir)]
            injection.expect(recorded == list(range(1, recorded[-1] + 1)), f"recorded {recorded}")
            saved = saved_step(run_dir, injection)
            injection.expect(saved > repaired, f"step {saved} is the last one saved; the disk works since {repaired}")
            injection.steps_lost = recorded[-1] - saved
            injection.processes, injection.files = 0, sum(path.name.startswith(".") for path in disk.iterdir())
        finally:
            run.process.kill()
            run.process.wait()
            subprocess.run(["umount", "--lazy", str(disk)], check=True)
    injection.expect_clean()


def named(run: Run) -> str:
    return first_line(r"no checkpoint of step \d+: .*(No space left|Read-only file system)", run.log.read_text())


def fill(disk: Path) -> None:
    with suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass


def make_room(disk: Path) -> None:
    (disk / "filler").unlink()


def remount(options: str, disk: Path) -> None:
    """A file that is open for writing hinders it, so it tries again."""
    command = ["mount", "-o", f"remount,{options}", str(disk)]
    wait_for(lambda: subprocess.run(command, capture_output=True, check=False).returncode == 0, "remount")


def out_of_memory(random: Random, injection: Injection) -> None:
    """Another process of the control group takes all memory; the kernel kills the run, and `launch` says so."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory, control_group() as group:
        run_dir = Path(directory) / "run"
        log = Path(directory) / "log"
        run = [sys.executable, "-m", "tests.chaos.counting", str(run_dir), "--alone"]
        # The kernel kills the process with the highest score first.
        shell = [
            "sh",
            "-c",
            f'echo $$ >{group}/cgroup.procs; echo 1000 >/proc/self/oom_score_adj; exec "$@"',
            "_",
            *run,
        ]
        with log.open("wb") as output:
            launch = subprocess.Popen(
                [sys.executable, "-m", "entrypoints", "--single", "--no-ray", "--", *shell],
                env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
                cwd=REPOSITORY,
                stdout=output,
                stderr=output,
            )
        wait_for(lambda: len(rows_of(run_dir)) > 1, f"step: {log.read_text()}")
        time.sleep(random.uniform(0, 0.3))
        began = time.monotonic()
        take = f"{sys.executable} -c 'import time; taken = b\"x\" * {2 * LIMIT}; time.sleep(60)'"
        hog = f"echo $$ >{group}/cgroup.procs; exec {take}"
        hungry = subprocess.Popen(["sh", "-c", hog], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            injection.exits = [launch.wait(PATIENCE)]
        finally:
            for process in (hungry, launch):
                process.terminate()
                process.wait()
        injection.detected = injection.ended = round(time.monotonic() - began, 3)
        injection.expect(injection.exits == [137], f"exit code {injection.exits} instead of 137: {log.read_text()}")
        injection.cause = first_line("SIGKILL killed the command; .* memory ran out", log.read_text())
        injection.processes = len((group / "cgroup.procs").read_text().split())
        recorded = rows_of(run_dir)[-1]["step"]
        injection.moment = f"step {recorded}"
        injection.steps_lost = max(0, recorded - saved_step(run_dir, injection))
        again = Run(run_dir)
        again.wait_for_steps(2)
        again.end(15)
        injection.files = sum(path.name.startswith(".") for path in (run_dir / "checkpoints").iterdir())
    injection.expect_clean()


@contextmanager
def control_group() -> Iterator[Path]:
    """A control group with little memory, of either version."""
    parent = next(path for path in CGROUPS if (path / "cgroup.procs").exists())
    group = parent / f"slipway-chaos-{os.getpid()}"
    group.mkdir()
    try:
        for name in ("memory.limit_in_bytes", "memory.max"):
            if (group / name).exists():
                (group / name).write_text(str(LIMIT))
        yield group
    finally:
        wait_for(lambda: not (group / "cgroup.procs").read_text(), "end of the processes of the control group")
        group.rmdir()


def wait_for(reached: Callable[[], object], awaited: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not reached():
        if time.monotonic() > deadline:
            raise NotStartedError(f"no {awaited}")
        time.sleep(0.005)


KINDS = (
    Kind("disk full", partial(inject, fill, make_room)),
    Kind("disk read-only", partial(inject, partial(remount, "ro"), partial(remount, "rw"))),
    Kind("out of memory", out_of_memory),
)
