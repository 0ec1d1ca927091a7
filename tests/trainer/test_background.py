"""Clean-ups end within a time, and say what they left."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from trainer.background import ended_within, in_background

ROOT = Path(__file__).parents[2]


def test_work_that_ends_in_time_is_done(caplog: pytest.LogCaptureFixture) -> None:
    done: list[int] = []
    assert ended_within(10, lambda: done.append(1), "nothing")
    assert done == [1]
    assert not caplog.text


def test_work_that_does_not_end_is_left_and_named(caplog: pytest.LogCaptureFixture) -> None:
    never = threading.Event()
    assert not ended_within(0.05, never.wait, "the removal of /a/b")
    assert "the removal of /a/b: not done after 0.05 s, and left" in caplog.text
    never.set()


@pytest.mark.parametrize("error", [ValueError("x"), TimeoutError("its own")])
def test_an_error_of_the_work_is_the_callers(error: Exception) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error), match=str(error)):
        ended_within(10, fail, "nothing")
    assert in_background(fail, "nothing").exception(10) is error


@pytest.mark.parametrize(
    "hindrance",
    [
        "threading.Thread(target=time.sleep, args=(600,), name='a disk').start()",
        "atexit.register(time.sleep, 600)",
        "ThreadPoolExecutor(1, 'a disk').submit(time.sleep, 600)",
    ],
)
def test_a_process_ends_whatever_its_threads_and_packages_wait_for(hindrance: str) -> None:
    done = ended_by(f"background.EXIT_SECONDS = 0.5; {hindrance}")
    assert done.returncode == 7
    assert "not ended after 0.5 s, and left" in done.stderr


def test_a_process_ends_without_a_tear_down_of_the_interpreter_in_which_threads_of_packages_crash() -> None:
    done = ended_by(
        "atexit.register(print, 'exit function')",
        "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()",
        "logging.torn_down = type('Torn', (), {'__del__': lambda self: os.write(1, b'tear-down')})()",
    )
    assert (done.returncode, done.stdout.splitlines()) == (7, ["thread", "exit function"])


def ended_by(*statements: str) -> subprocess.CompletedProcess[str]:
    """The end of a process whose command is these statements, with status 7."""
    program = (
        "import atexit, logging, os, sys, threading, time; from concurrent.futures import ThreadPoolExecutor\n"
        "from trainer import background, cli\n"
        "def command(*_, **__):\n" + "".join(f"    {statement}\n" for statement in statements) + "    return 7\n"
        "cli.app = command\n"
        "cli.run_process([])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
