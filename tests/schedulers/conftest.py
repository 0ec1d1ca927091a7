"""Slurm's own programs, and two-node clusters of containers: the cpu image with schedulers and MPIs."""

import importlib.util
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import docker
import pytest
from docker.models.containers import Container

HERE = Path(__file__).parent
NODES = ("n1", "n2")
STARTS_WITHIN = 60.0
"""Seconds in which the daemons must start."""
RUNS_WITHIN = 240
"""Seconds in which a job must end."""
FURTHER = "gridengine-client gridengine-master gridengine-exec mpich"
"""Packages of the tests marked `full`."""
DEBIAN_12 = "bookworm"
"""The release of the image itself."""
DEBIAN_13 = "trixie"
SLURM_CONF = """
ClusterName=none
SlurmctldHost=localhost
AuthType=auth/none
CredType=cred/none
NodeName=localhost
PartitionName=all Nodes=ALL
"""


@pytest.fixture(scope="session")
def scontrol(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, str]]:
    """The path of scontrol, and the environment in which it needs no controller."""
    program = shutil.which("scontrol")
    if program is None:
        pytest.fail("scontrol is missing: run ci/setup, which installs Debian's slurm-client")
    configuration: Path = tmp_path_factory.mktemp("slurm") / "slurm.conf"
    configuration.write_text(SLURM_CONF, encoding="ascii")
    return program, {"SLURM_CONF": str(configuration)}


@dataclass(frozen=True)
class Ended:
    status: int
    output: str
    """Both streams."""


@dataclass(frozen=True)
class Cluster:
    containers: dict[str, Container]

    def run(self, command: str, node: str = "n1", **environment: str) -> Ended:
        """Run a shell command on a node and wait for its end."""
        return self.start(command, node, **environment)()

    def start(self, command: str, node: str = "n1", **environment: str) -> "Running":
        variables = [text for name, value in environment.items() for text in ("--env", f"{name}={value}")]
        line = ["docker", "exec", *variables, str(self.containers[node].id), "sh", "-c", command]
        return Running(subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))

    def put(self, path: str, text: str, node: str = "n1") -> None:
        """Write a file on a node."""
        line = ["docker", "exec", "--interactive", str(self.containers[node].id), "sh", "-c", f"cat > {path}"]
        subprocess.run(line, input=text, text=True, check=True)

    def wait_until(self, command: str, words: str) -> None:
        """Repeat a command until it prints these words."""
        end = time.monotonic() + RUNS_WITHIN
        while words not in (output := self.run(command).output):
            if time.monotonic() > end:
                pytest.fail(f"`{command}` did not print `{words}` within {RUNS_WITHIN} s: {output}")
            time.sleep(1)

    def ray_processes(self) -> str:
        """The Ray processes on all nodes; empty if there are none."""
        look = "pgrep -l -x raylet; pgrep -l -x gcs_server; true"
        return "".join(self.run(look, node).output for node in self.containers)


class Running:
    """A command in a container. Call it to wait for the end."""

    def __init__(self, popen: "subprocess.Popen[str]") -> None:
        self._popen = popen

    def __call__(self) -> Ended:
        output, _ = self._popen.communicate(timeout=RUNS_WITHIN)
        return Ended(self._popen.returncode, output)


@pytest.fixture(scope="session", params=[DEBIAN_12])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Two nodes whose daemons answer, with Debian 12's packages; a module may ask for DEBIAN_13."""
    full = any(item.get_closest_marker("full") for item in request.session.items)
    image = node_image(request.param, FURTHER if full else "")
    client = docker.from_env()
    name = f"slipway-test-{secrets.token_hex(4)}"
    network = client.networks.create(name, driver="bridge")
    containers = {}
    try:
        for node in NODES:
            containers[node] = client.containers.create(
                image, name=f"{name}-{node}", hostname=node, shm_size="1g", network=name,
                networking_config={name: client.api.create_endpoint_config(aliases=[node])},
            )  # fmt: skip
            containers[node].start()
        running = Cluster(containers)
        _wait_for_slurm(running)
        yield running
    finally:
        for container in containers.values():
            container.remove(force=True)
        network.remove()


@pytest.fixture
def no_ray_is_left(cluster: Cluster) -> Iterator[None]:
    """Fail the test if Ray processes are left after it."""
    yield
    assert cluster.ray_processes() == ""


def node_image(suite: str, further: str) -> str:
    """Build the image of a node with the packages of a Debian release."""
    arguments = {"IMAGE": os.environ.get("SLIPWAY_TEST_IMAGE", "slipway:cpu"), "FURTHER": further}
    if suite != DEBIAN_12:
        arguments |= {"SUITE": suite, "FURTHER": "condor"}
    package = importlib.util.find_spec("hyperqueue")
    if package is None or package.origin is None:
        pytest.fail("hyperqueue is missing: run ci/setup")
    contexts = {"apt": "/etc/apt", "hyperqueue": str(Path(package.origin).parent)}
    tag = f"slipway-test-scheduler:{suite}"
    done = subprocess.run(
        ["docker", "buildx", "build", "--quiet", "--load", "--network", "host", "--tag", tag,
         *(text for pair in contexts.items() for text in ("--build-context", "=".join(pair))),
         *(text for pair in arguments.items() for text in ("--build-arg", "=".join(pair))), str(HERE)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return tag


def _wait_for_slurm(cluster: Cluster) -> None:
    end = time.monotonic() + STARTS_WITHIN
    while time.monotonic() < end:
        answer = cluster.run("sinfo --noheader --format '%T %D'")
        if answer.output.split() == ["idle", "2"]:
            return
        time.sleep(0.5)
    logs = "\n".join(container.logs().decode() for container in cluster.containers.values())
    pytest.fail(f"Slurm is not up within {STARTS_WITHIN:g} s: {answer.output}\n{logs}")
