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
    program = (
        "import atexit, logging, sys, threading, time; from concurrent.futures import ThreadPoolExecutor\n"
        "from trainer import background, cli; background.EXIT_SECONDS = 0.5\n"
        f"cli.app = lambda *_, **__: ({hindrance}, 7)[1]\n"
        "cli.run_process([])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 7
    assert "not ended after 0.5 s, and left" in done.stderr
