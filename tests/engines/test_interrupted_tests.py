"""`buildkit test` on a real engine leaves no container and no network, however it ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from buildkit.images.test import LABEL
from tests.engines.conftest import ROOT, need

IMAGE = os.environ.get("SLIPWAY_TEST_IMAGE", "slipway:cpu")


def labelled(*listing: str) -> set[str]:
    command = ["docker", *listing, "--quiet", "--filter", f"label={LABEL}"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def things() -> set[str]:
    return labelled("container", "ls", "--all") | labelled("network", "ls")


def terminate(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)


def terminate_all(process: subprocess.Popen[bytes]) -> None:
    """As `timeout` and a closed terminal do: buildkit and pytest get the signal."""
    os.killpg(process.pid, signal.SIGTERM)


def interrupt_twice(process: subprocess.Popen[bytes]) -> None:
    """As an impatient person does: the first signal already ends the tests."""
    for _ in range(2):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.5)


def kill_pytest(process: subprocess.Popen[bytes]) -> None:
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True).stdout
    for child in children.split():
        os.kill(int(child), signal.SIGKILL)


@pytest.mark.parametrize(
    ("stop", "status"),
    [(terminate, 143), (terminate_all, 143), (interrupt_twice, 130), (kill_pytest, 137)],
)
def test_ended_container_tests_leave_nothing(stop: Callable[[subprocess.Popen[bytes]], None], status: int) -> None:
    need("docker")
    before = things()
    words = [
        "test",
        "--target",
        "cpu",
        "--image",
        IMAGE,
        "--tier",
        "cluster",
        "--",
        "-q",
        "-k",
        "one_ray_cluster or two",
    ]
    code = "from buildkit.cli import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", code, *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        end = time.monotonic() + 120
        while len(things() - before) < 2:  # a network and a container
            assert process.poll() is None, "the tests ended before anything was started"
            assert time.monotonic() < end
            time.sleep(0.2)
        stop(process)
        assert process.wait(90) == status
    assert things() - before == set()
