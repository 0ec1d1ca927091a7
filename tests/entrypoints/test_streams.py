"""Standard streams that are closed, broken or full."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.entrypoints.conftest import PATIENCE, REPOSITORY

LAUNCH = f"{sys.executable} -m entrypoints"


def shell(line: str, directory: Path) -> "subprocess.CompletedProcess[str]":
    """A line of bash in which LAUNCH stands for `launch`."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return subprocess.run(
        ["bash", "-c", line.replace("LAUNCH", LAUNCH)],
        env={**kept, "PYTHONPATH": str(REPOSITORY)},
        cwd=directory,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&-", ">&- 2>&- <&-"])
def test_a_closed_stream_changes_neither_the_job_nor_its_status(closed: str, tmp_path: Path) -> None:
    command = "sh -c 'echo out; echo err >&2; ls -l /proc/self/fd > files; exit 7'"
    ended = shell(f"LAUNCH --no-ray -- {command} {closed}", tmp_path)
    assert ended.returncode == 7, ended.stderr
    assert "Traceback" not in ended.stderr
    opened = (tmp_path / "files").read_text(encoding="utf-8")
    assert "socket" not in opened  # none of launch's own has taken the place of a stream


def test_a_closed_stdout_is_no_error_of_a_subcommand(tmp_path: Path) -> None:
    ended = shell("LAUNCH explain >&-", tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("words", ["explain", "environments --markdown", "--help", "--version", "hosts n[1-9999]"])
def test_a_reader_that_goes_away_is_quiet(words: str, tmp_path: Path) -> None:
    ended = shell(f"LAUNCH {words} | true; echo ${{PIPESTATUS[0]}}", tmp_path)
    assert ended.stdout in (f"{128 + signal.SIGPIPE}\n", "0\n")  # 0 if all was written before the reader ended
    assert ended.stderr == ""


@pytest.mark.parametrize("words", ["explain", "environments --markdown", "--help", "--version", "hosts n[1-9999]"])
def test_a_full_disk_behind_stdout_is_an_error(words: str, tmp_path: Path) -> None:
    ended = shell(f"LAUNCH {words} > /dev/full", tmp_path)
    assert ended.returncode == 17
    assert ended.stderr == "error: cannot write to stdout: No space left on device\n"


@pytest.mark.parametrize("broken", ["2> /dev/full", "2> >(exec true)"])
def test_an_unwritable_stderr_does_not_change_the_status(broken: str, tmp_path: Path) -> None:
    assert shell(f"LAUNCH --no-ray -- sh -c 'sleep 0.3; exit 7' {broken}", tmp_path).returncode == 7
    assert shell(f"LAUNCH --no-ray -- /no/such/program {broken}", tmp_path).returncode == 127
    assert shell(f"LAUNCH --nonsense {broken}", tmp_path).returncode == 2
