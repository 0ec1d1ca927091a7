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
    """The variables with which a program reaches a running cluster of one node."""
    launch = start("--single", *SMALL, "--", "sh", "-c", SHOW, SLIPWAY_DEADLINE="200")
    variables = json.loads(launch.read_line())
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


@pytest.mark.parametrize("step", [{}, {**SECOND_OF_TWO, "NODE_RANK": "0"}, SECOND_OF_TWO, SCRIPT])
def test_a_dead_address_is_refused_on_every_node_before_the_deadline(start: Start, step: dict[str, str]) -> None:
    ended = start("--", "echo", "ran", RAY_ADDRESS=f"127.0.0.1:{free_port()}", **step).wait()
    assert (ended.status, ended.stdout) == (16, "")
    assert "no Ray cluster answers there: connection refused" in ended.stderr
    assert "unset RAY_ADDRESS to form a cluster" in ended.stderr


@pytest.mark.parametrize("address", ["no.such.head.invalid:6379", "ray://no.such.head.invalid:10001"])
def test_a_name_that_does_not_resolve_is_refused(start: Start, address: str) -> None:
    ended = start("--", "echo", "ran", RAY_ADDRESS=address).wait()
    assert (ended.status, ended.stdout) == (16, "")
    assert f"RAY_ADDRESS is {address}, but no Ray cluster answers there: its name does not resolve" in ended.stderr


def test_a_program_that_is_no_ray_cluster_is_refused(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        ended = start("--", "echo", "ran", RAY_ADDRESS=f"127.0.0.1:{other.getsockname()[1]}").wait()
    assert (ended.status, ended.stdout) == (16, "")
    assert "what listens there does not answer as one within 15 s" in ended.stderr


def test_local_forms_a_cluster(start: Start) -> None:
    ended = start("--single", *SMALL, "--", "printenv", "RAY_ADDRESS", RAY_ADDRESS="local").wait()
    assert ended.status == 0, ended.stderr
    assert ended.stdout.startswith("127.0.0.1:")
    assert "RAY_ADDRESS=local names no cluster: this job forms one" in ended.stderr
