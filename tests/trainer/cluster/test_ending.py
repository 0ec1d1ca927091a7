"""A process that uses Ray ends, also if Ray does not answer."""

import os
import subprocess
import sys

import pytest

from tests.trainer.ray_node import REPOSITORY

PROGRAM = """
import os, signal, sys
import ray
from trainer.cluster.ending import leave
from trainer.cluster.connection import connected
from trainer.errors import WorkerError

with connected():
    processes = ray._private.worker._global_node.all_processes
    assert ray.get(ray.remote(lambda: 7).options(num_cpus=0).remote()) == 7
    for name in sys.argv[1:]:
        os.kill(processes[name][0].process.pid, signal.SIGSTOP)
print("disconnected", flush=True)
if sys.argv[1:]:
    try:
        with connected():
            pass
    except WorkerError as error:
        print(error, flush=True)
leave(3)
"""


def run(*stopped: str) -> tuple[int, str]:
    """Exit status and output of a process that stops these processes of its own cluster before it ends."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"PYTHONPATH": str(REPOSITORY), "RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": "local"}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, *stopped], env=environment, capture_output=True, text=True, timeout=200
    )
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_a_stopped_ray_does_not_hold_the_end_up(name: str) -> None:
    status, output = run(name)
    assert status == 3, output
    assert "Ray does not answer: this process ends without disconnecting from it" in output
    assert "Ray did not answer when this run disconnected from it" in output


def test_the_end_is_the_usual_one_with_a_ray_that_answers() -> None:
    status, output = run()
    assert status == 3, output
    assert "Ray does not answer" not in output
