"""One node without Ray: the command, its signals, its terminal and everything it leaves behind."""

import os
import pty
import select
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.entrypoints.conftest import PATIENCE, REPOSITORY, Start


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_reaches_the_command_as_sigterm_and_sets_the_status(start: Start, number: signal.Signals) -> None:
    launch = start("--no-ray", "--", "sh", "-c", "trap 'echo saving; exit 3' TERM; echo up; sleep 60 & wait")
    assert launch.read_line() == "up"
    launch.signal(number)
    ended = launch.wait()
    assert ended.status == 128 + number
    assert ended.stdout == "saving\n"
    assert f"received {number.name}" in ended.stderr


def test_a_command_that_ignores_sigterm_is_killed_after_the_grace(start: Start) -> None:
    launch = start("--no-ray", "--grace", "0.5", "--", "sh", "-c", "trap '' TERM; echo $$; while :; do sleep 60; done")
    pid = int(launch.read_line())
    began = time.monotonic()
    launch.signal(signal.SIGTERM)
    assert launch.wait().status == 143
    assert 0.5 <= time.monotonic() - began < 5
    assert not alive(pid)


def test_daemons_of_the_command_do_not_survive_it(start: Start) -> None:
    # A double fork in a session of its own, without the environment, that ignores SIGTERM: only the tree finds it.
    script = "(trap '' TERM; exec env -i /usr/bin/setsid /bin/sleep 987) & echo $!; exit 5"
    ended = start("--no-ray", "--", "sh", "-c", script).wait()
    assert ended.status == 5
    assert not alive(int(ended.stdout))


def test_other_processes_of_the_user_are_left_alone(start: Start) -> None:
    bystander = os.posix_spawn("/bin/sleep", ["sleep", "60"], os.environ)
    try:
        assert start("--no-ray", "--", "true").wait().status == 0
        assert alive(bystander)
    finally:
        os.kill(bystander, signal.SIGKILL)
        os.waitpid(bystander, 0)


def test_orphans_are_reaped_while_the_command_runs(start: Start) -> None:
    script = (
        "for i in 1 2 3; do (sleep 0.05 & ); done; sleep 0.5; grep -l '^PPid:.'$PPID'$' /proc/[0-9]*/status | wc -l"
    )
    assert start("--no-ray", "--", "sh", "-c", script).wait().stdout.strip() == "1"


def test_the_command_has_the_terminal() -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(REPOSITORY)
        script = "test -t 0 && test -t 1 && test -t 2 && read answer && echo got $answer; sleep 60"
        os.execv(sys.executable, [sys.executable, "-m", "entrypoints", "--no-ray", "--", "sh", "-c", script])
    try:
        os.write(terminal, b"hello\n")
        assert "got hello" in read_until(terminal, "got hello")
        os.write(terminal, b"\x1a")  # Ctrl-Z does nothing
        os.write(terminal, b"\x03")  # Ctrl-C
        read_until(terminal, None)
    finally:
        os.close(terminal)  # hangs up, which ends the launch if it is still there
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == 130


def read_until(terminal: int, text: str | None) -> str:
    """Read until this text, or until the other side closes."""
    seen = ""
    while text is None or text not in seen:
        readable, _, _ = select.select([terminal], [], [], PATIENCE)
        assert readable, f"nothing more after {seen!r}"
        try:
            seen += os.read(terminal, 1024).decode()
        except OSError:  # the other side is closed
            break
    return seen
