"""The console is no part of a command's work: full, closed, hung up or never read, the command goes on."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LINES = 2000
# Writes as a run does: messages, its progress, and files of its own, which must not get the console's descriptors.
PROGRAM = f"""
import logging, sys
from trainer.records.console import RUN_COLUMNS, progress
from trainer.records.streams import detached_console

with detached_console():
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    file = open("record", "w")
    with progress({LINES}, 0, RUN_COLUMNS) as shown:
        for step in range({LINES}):
            logging.info("message %d %s", step, "x" * 100)
            shown.step(step, {{"reward/mean": step / 7}})
    file.write(f"{{step}} {{file.fileno()}}")
    file.close()
sys.exit(7)
"""


@contextmanager
def started(directory: Path, redirection: str = "", **streams: object) -> Iterator["subprocess.Popen[bytes]"]:
    shell = f'exec "$0" -c "$1" {redirection}'
    process = subprocess.Popen(
        ["sh", "-c", shell, sys.executable, PROGRAM],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        **streams,  # type: ignore[call-overload]
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def ended_well(directory: Path, process: "subprocess.Popen[bytes]") -> bool:
    assert process.wait(60) == 7
    step, descriptor = (directory / "record").read_text().split()
    return int(step) == LINES - 1 and int(descriptor) > 2


@pytest.mark.parametrize(
    "redirection", ["2>/dev/full", "2>&-", ">&- 2>&-", "<&- >&- 2>&-", "2>/dev/full >/dev/full", "2>/dev/null"]
)
def test_a_command_goes_on_without_its_console(tmp_path: Path, redirection: str) -> None:
    with started(tmp_path, redirection) as process:
        assert ended_well(tmp_path, process)


def test_a_command_goes_on_after_the_reader_of_its_console_ended(tmp_path: Path) -> None:
    with started(tmp_path, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        process.stderr.readline()
        process.stderr.close()
        assert ended_well(tmp_path, process)


def test_a_command_goes_on_while_nobody_reads_its_console(tmp_path: Path) -> None:
    with started(tmp_path, stderr=subprocess.PIPE) as process:
        assert ended_well(tmp_path, process)


def test_a_reader_gets_every_line_in_order(tmp_path: Path) -> None:
    with started(tmp_path, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        lines = process.stderr.read().decode().splitlines()
        assert ended_well(tmp_path, process)
    assert [line.split()[1] for line in lines if line.startswith("message")] == [str(step) for step in range(LINES)]
    assert sum(line.startswith("step ") for line in lines) == LINES


def test_a_slow_reader_learns_how_many_lines_it_missed(tmp_path: Path) -> None:
    program = (
        "import sys; from trainer.records import streams; streams.MOST_WAITING = 50_000\n"
        "with streams.detached_console():\n"
        "    for number in range(4000): sys.stderr.write(f'line {number} ' + 'x' * 40 + '\\n')\n"
        "    sys.stdout.write('written\\n'); sys.stdout.flush(); sys.stdin.readline()\n"
        "    sys.stderr.write('the end\\n')"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], env=environment, text=True, **streams) as process:  # type: ignore[call-overload]
        process.stdout.readline()
        first = process.stderr.readline()
        process.stdin.write("\n")
        process.stdin.flush()
        lines = [first, *process.stderr.read().splitlines()]
    assert lines[-1] == "the end"
    missed = sum(int(line.split()[0]) for line in lines if "lines are missing here" in line)
    assert missed == 4000 - sum(line.startswith("line ") for line in lines) > 0


@pytest.mark.parametrize(
    ("redirection", "status", "message"),
    [
        (">/dev/full", 1, "error: standard output cannot be written: [Errno 28] No space left on device"),
        ("| true", 0, ""),
        (">&-", 0, ""),
    ],
)
def test_a_result_that_cannot_be_printed_is_one_message(redirection: str, status: int, message: str) -> None:
    """A reader that has ended is none: it has read what it wanted."""
    shell = f'"$0" -m trainer config rollout actor data {redirection}'
    done = subprocess.run(
        ["sh", "-c", shell, sys.executable], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == status
    assert done.stderr.split("\n\n")[0].strip() == message
