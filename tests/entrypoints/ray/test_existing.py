"""RAY_ADDRESS names a cluster that exists already: a real one, or none."""

import json
import socket
from collections.abc import Iterator

import pytest

from tests.entrypoints.conftest import Start
from tests.entrypoints.ray.conftest import SMALL
from tests.serving import free_port

pytest.importorskip("ray", reason="needs Ray, which the images have")
pytestmark = pytest.mark.usefixtures("nothing_is_left")

SECOND_OF_TWO = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "a"}
SCRIPT = {"SLURM_JOB_ID": "5", "SLURM_NODEID": "0", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
SHOW = 'python3 -c "import json, os; print(json.dumps(dict(os.environ)))"; exec sleep 300'


@pytest.fixture
def cluster(start: Start) -> Iterator[dict[str, str]]:
    """The variables with which a program reaches a cluster of one node, which `local` forms."""
    launch = start("--single", *SMALL, "--", "sh", "-c", SHOW, SLIPWAY_DEADLINE="200", RAY_ADDRESS="local")
    variables = json.loads(launch.read_line())
    assert variables["RAY_ADDRESS"].startswith("127.0.0.1:")
    yield {name: value for name, value in variables.items() if name.startswith("RAY_")}
    launch.kill()


def test_the_command_runs_once_and_against_the_existing_cluster(start: Start, cluster: dict[str, str]) -> None:
    attached = start("--", "printenv", "RAY_ADDRESS", **cluster).wait()
    assert (attached.status, attached.stdout) == (0, f"{cluster['RAY_ADDRESS']}\n"), attached.stderr
    assert "no cluster is formed" in attached.stderr
    second = start("--", "echo", "ran", **cluster, **SECOND_OF_TWO).wait()
    assert (second.status, second.stdout) == (0, ""), second.stderr
    script = start("--", "echo", "ran", **cluster, **SCRIPT).wait()  # a batch script may do without srun
    assert (script.status, script.stdout) == (0, "ran\n"), script.stderr


def test_an_address_without_a_cluster_is_refused_on_every_node_before_the_deadline(start: Start) -> None:
    """All cases side by side: each waits, as the cluster may only be about to start."""
    closed, names = f"127.0.0.1:{free_port()}", ("no.such.head.invalid:6379", "ray://no.such.head.invalid:10001")
    steps: list[dict[str, str]] = [{}, {**SECOND_OF_TWO, "NODE_RANK": "0"}, SECOND_OF_TWO, SCRIPT]
    with socket.create_server(("127.0.0.1", 0)) as other:
        silent = f"127.0.0.1:{other.getsockname()[1]}"
        cases = [
            *((step, closed, "connection refused") for step in steps),
            *(({}, name, "its name does not resolve") for name in names),
            ({}, silent, "what listens there does not answer as one within 15 s"),
        ]
        launches = [start("--", "echo", "ran", RAY_ADDRESS=address, **step) for step, address, _ in cases]
        for launch, (_, address, cause) in zip(launches, cases, strict=True):
            ended = launch.wait()
            assert (ended.status, ended.stdout) == (16, "")
            assert f"RAY_ADDRESS is {address}, but no Ray cluster answers there: {cause}" in ended.stderr
            assert "unset RAY_ADDRESS to form a cluster" in ended.stderr
