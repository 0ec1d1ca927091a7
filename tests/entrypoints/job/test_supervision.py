"""One node without Ray: the command, its signals, its terminal and its leftover processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.entrypoints.conftest import PATIENCE, REPOSITORY, Start
from tests.entrypoints.terminal import launch_in_terminal
from tests.process_table import alive, children

UNFORESEEN = """
import asyncio
from entrypoints.environments.process_view import ProcessView
from entrypoints.environments.single import Single
from entrypoints.job.node import Node
from entrypoints.options import Options

async def divide():
    return 1 / 0

async def main():
    allocation = Single.detect(ProcessView(variables={}, hostname="here"))
    node = Node(allocation, Options(command=("true",)), None, "here", {})
    node.run_in_background(divide())
    await node.unless_failed(asyncio.sleep(60))

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGKILL, "SIGKILL killed the command; if nobody sent it, the kernel did because memory ran out"),
        (signal.SIGSEGV, "SIGSEGV killed the command\n"),
        (35, "signal 35 killed the command\n"),
    ],
)
def test_the_signal_that_killed_the_command_is_named(start: Start, number: int, words: str) -> None:
    ended = start("--single", "--no-ray", "--", "sh", "-c", f"kill -{int(number)} $$").wait()
    assert ended.status == 128 + number
    assert words in ended.stderr


def test_a_second_signal_does_not_change_the_status_of_a_launch_that_ends() -> None:
    """Python gives signals back to the kernel before it exits, so that one would kill the launch."""
    program = """
import signal, sys
from entrypoints.job.guard import guarded
status = guarded(lambda: 7)
print(signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, []), flush=True)
sys.exit(status)
"""
    ended = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert ended.returncode == 7
    assert ended.stdout.split() == ["False", "True"]  # the second process, then the first


STOPS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGALRM]


@pytest.mark.parametrize("number", STOPS)
def test_a_signal_reaches_the_command_as_sigterm_and_sets_the_status(start: Start, number: signal.Signals) -> None:
    launch = start("--no-ray", "--", "sh", "-c", "trap 'echo saving; exit 3' TERM; echo up; sleep 60 & wait")
    assert launch.read_line() == "up"
    launch.signal(number)
    ended = launch.wait()
    assert ended.status == 128 + number
    assert ended.stdout == "saving\n"
    assert f"received {number.name}" in ended.stderr


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU])
def test_a_schedulers_warning_gives_the_command_time(start: Start, number: signal.Signals) -> None:
    script = "trap 'sleep 1; echo saved; exit 0' TERM; echo up; sleep 60 & wait"
    launch = start("--no-ray", "--grace", "0.1", "--", "sh", "-c", script)
    assert launch.read_line() == "up"
    launch.signal(number)
    ended = launch.wait()
    assert (ended.status, ended.stdout) == (128 + number, "saved\n")


def test_an_unexpected_error_in_background_work_ends_the_node() -> None:
    program = [sys.executable, "-c", UNFORESEEN]
    done = subprocess.run(program, cwd=REPOSITORY, capture_output=True, text=True, timeout=30)
    assert "ZeroDivisionError" in done.stderr.splitlines()[-1]
    assert done.returncode == 1


COUNT_STARTS = "echo x >> starts; [ $(wc -l < starts) -gt 2 ] || exit 9"


def test_a_failed_command_restarts_until_it_succeeds(start: Start, tmp_path: Path) -> None:
    ended = start("--no-ray", "--max-restarts", "3", "--", "sh", "-c", COUNT_STARTS).wait()
    assert ended.status == 0
    assert (tmp_path / "starts").read_text() == "x\nx\nx\n"
    assert "the command failed with status 9; restart 2 of 3" in ended.stderr


def test_restarts_are_bounded(start: Start, tmp_path: Path) -> None:
    assert start("--no-ray", "--max-restarts", "1", "--", "sh", "-c", COUNT_STARTS).wait().status == 9
    assert (tmp_path / "starts").read_text() == "x\nx\n"


@pytest.mark.parametrize("status", [0, 2])
def test_a_finished_or_misused_command_does_not_restart(start: Start, tmp_path: Path, status: int) -> None:
    script = f"echo x >> starts; exit {status}"
    assert start("--no-ray", "--max-restarts", "3", "--", "sh", "-c", script).wait().status == status
    assert (tmp_path / "starts").read_text() == "x\n"


def test_a_stopped_command_does_not_restart(start: Start) -> None:
    launch = start("--no-ray", "--max-restarts", "3", "--", "sh", "-c", "echo up; exec sleep 60")
    assert launch.read_line() == "up"
    launch.signal(signal.SIGTERM)
    ended = launch.wait()
    assert (ended.status, ended.stdout) == (143, "")


def test_the_time_after_a_warning_is_bounded(start: Start) -> None:
    launch = start(
        "--no-ray", "--warning-grace", "0.5", "--", "sh", "-c", "trap '' TERM; echo up; while :; do sleep 60; done"
    )
    assert launch.read_line() == "up"
    launch.signal(signal.SIGUSR1)
    assert launch.wait().status == 128 + signal.SIGUSR1


def test_the_log_is_kept_in_the_log_directory(start: Start, tmp_path: Path) -> None:
    start("--no-ray", "--log-dir", str(tmp_path / "logs"), "--hostname", "here", "--", "/no/such/program").wait()
    kept = (tmp_path / "logs" / "node0-here" / "launch.log").read_text(encoding="utf-8")
    assert "launch[0 head]: single: node 0 of 1 (here)" in kept
    assert "error: cannot run '/no/such/program'" in kept


def test_a_log_directory_that_cannot_be_made_is_an_error(start: Start) -> None:
    ended = start("--no-ray", "--log-dir", "/proc/none", "--", "true").wait()
    assert ended.status == 2
    assert "cannot write logs to /proc/none/node0-" in ended.stderr


def test_a_command_that_ignores_sigterm_is_killed_after_the_grace(start: Start) -> None:
    launch = start("--no-ray", "--grace", "0.5", "--", "sh", "-c", "trap '' TERM; echo $$; while :; do sleep 60; done")
    pid = int(launch.read_line())
    launch.signal(signal.SIGTERM)
    assert launch.wait().status == 143
    assert not alive(pid)


def test_daemons_of_the_command_do_not_survive_it(start: Start) -> None:
    # A daemon in its own session, without environment, that ignores SIGTERM: only the process tree finds it.
    script = "(trap '' TERM; exec env -i /usr/bin/setsid /bin/sleep 987) & echo $!; exit 5"
    ended = start("--no-ray", "--", "sh", "-c", script).wait()
    assert ended.status == 5
    assert not alive(int(ended.stdout))


TREE = "(exec env -i setsid sleep 988) & echo $!; trap 'echo saving' TERM; echo $$; wait; wait; exec sleep 60"


@pytest.mark.parametrize("which", ["first", "second"])
def test_a_killed_launch_leaves_no_process_behind(start: Start, which: str) -> None:
    launch = start("--no-ray", "--grace", "0.5", "--", "sh", "-c", TREE)
    pids = [int(launch.read_line()) for _ in range(2)]
    (second,) = children(launch.pid)
    os.kill(launch.pid if which == "first" else second, signal.SIGKILL)
    assert launch.read_line() == "saving"
    deadline = time.monotonic() + PATIENCE
    while any(alive(pid) for pid in (*pids, second)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    ended = launch.wait()
    assert ended.status == (-9 if which == "first" else 137)
    assert "was killed" in ended.stderr if which == "first" else "SIGKILL killed this launch" in ended.stderr


def test_ctrl_c_while_waiting_is_quiet(start: Start, tmp_path: Path) -> None:
    task = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
    launch = start("--no-ray", "--", "true", SLIPWAY_JOB_DIR=str(tmp_path), **task)
    while "waiting for the head's note" not in launch.read_error():
        pass
    launch.signal_all(signal.SIGINT)
    ended = launch.wait()
    assert ended.status == 130
    assert ended.stderr == ""


def test_ctrl_c_during_the_imports_is_quiet(start: Start, tmp_path: Path) -> None:
    (tmp_path / "argparse.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    launch = start("--", "true", PYTHONPATH=f"{tmp_path}:{REPOSITORY}")
    assert launch.read_line() == "importing"
    launch.signal(signal.SIGINT)
    ended = launch.wait()
    assert (ended.status, ended.stderr) == (-signal.SIGINT, "")


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_that_was_ignored_before_stays_ignored(start: Start, number: signal.Signals) -> None:
    """As under nohup, which keeps a job alive when its terminal closes."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        launch = start("--no-ray", "--", "sh", "-c", "echo up; kill -$0 $$; sleep 1; exit 7", str(int(number)))
    finally:
        signal.signal(number, before)
    assert launch.read_line() == "up"
    launch.signal_all(number)
    ended = launch.wait()
    assert ended.status == 7, ended.stderr


def test_the_command_may_open_as_many_files_as_the_system_allows() -> None:
    line = "ulimit -Sn 256; exec launch --no-ray -- sh -c 'ulimit -Sn; ulimit -Hn'"
    program = line.replace("launch", f"{sys.executable} -m entrypoints", 1)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(["sh", "-c", program], env=environment, capture_output=True, text=True, timeout=PATIENCE)
    soft, hard = done.stdout.split()
    assert soft == hard != "256"


def test_other_processes_of_the_user_are_left_alone(start: Start) -> None:
    bystander = os.posix_spawn("/bin/sleep", ["sleep", "60"], os.environ)
    try:
        assert start("--no-ray", "--", "true").wait().status == 0
        assert alive(bystander)
    finally:
        os.kill(bystander, signal.SIGKILL)
        os.waitpid(bystander, 0)


def test_orphans_are_reaped_while_the_command_runs(start: Start) -> None:
    children = "$(grep -l '^PPid:.'$PPID'$' /proc/[0-9]*/status | wc -l)"
    script = f'for i in 1 2 3; do (sleep 0.05 & ); done; until [ "{children}" = 1 ]; do sleep 0.1; done; echo reaped'
    assert start("--no-ray", "--", "sh", "-c", script).wait().stdout == "reaped\n"


def test_the_command_has_the_terminal() -> None:
    script = "test -t 0 && test -t 1 && test -t 2 && read answer && echo got $answer; sleep 60"
    with launch_in_terminal(REPOSITORY, "--no-ray", "--", "sh", "-c", script) as terminal:
        terminal.type(b"hello\n")
        assert "got hello" in terminal.read_until("got hello")
        terminal.type(b"\x1a")  # Ctrl-Z does nothing
        terminal.type(b"\x03")  # Ctrl-C
        terminal.read_until(None)
    assert terminal.status == 130


def test_it_is_said_how_to_end_a_command_that_ignores_ctrl_c() -> None:
    script = "trap '' INT; echo up; while :; do sleep 1; done"
    with launch_in_terminal(REPOSITORY, "--no-ray", "--", "sh", "-c", script) as terminal:
        terminal.read_until("up")
        time.sleep(1)  # for the process that hears of Ctrl-C
        for _ in range(2):
            terminal.type(b"\x03")
            seen = terminal.read_until("the job")
            assert "the command goes on after Ctrl-C: Ctrl-\\ ends it, `kill " in seen
        terminal.type(b"\x1c")
        terminal.read_until(None)
    assert terminal.status == 128 + signal.SIGQUIT


def test_ctrl_c_is_a_key_like_others_for_a_command_that_handles_it() -> None:
    script = "trap 'echo caught' INT; echo up; while :; do sleep 1; done"
    with launch_in_terminal(REPOSITORY, "--no-ray", "--", "sh", "-c", script) as terminal:
        terminal.read_until("up")
        time.sleep(1)
        terminal.type(b"\x03")
        seen = terminal.read_until("caught")
        time.sleep(6)  # one alone says nothing
        for _ in range(3):
            terminal.type(b"\x03")
            time.sleep(0.2)
        seen += terminal.read_until("the job")
        assert seen.count("goes on after Ctrl-C") == 1  # somebody who presses it three times wants the end
        kill = seen.partition("`kill ")[2].split("`")[0]
        os.kill(int(kill), signal.SIGTERM)
        terminal.read_until(None)
    assert terminal.status == 128 + signal.SIGTERM
