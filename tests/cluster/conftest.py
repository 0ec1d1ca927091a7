"""Jobs of several containers on a private network. `buildkit test` names the image in SLIPWAY_TEST_IMAGE."""

import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import docker
import pytest
from docker.models.containers import Container
from docker.models.networks import Network

LABELS = {"dev.slipway.test": os.environ.get("SLIPWAY_TEST_RUN", "")}  # `buildkit test` removes what has its own
DEADLINE = 240  # seconds in which a job of these tests must have ended

SHARED = "/tmp/training"
"""Where every node of a job sees the same directory."""


@dataclass
class Job:
    """The nodes node0, node1 … of one job. Every node gets the same `environment`, `options` and directory SHARED."""

    client: docker.DockerClient
    image: str
    network: Network
    size: int = 2
    environment: dict[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    containers: dict[str, Container] = field(default_factory=dict)

    def start(self, rank: int, *arguments: str, **environment: str) -> Container:
        name = f"node{rank}"
        hosts = ",".join(f"node{rank}" for rank in range(self.size))
        endpoint = self.client.api.create_endpoint_config(aliases=[name])
        container = self.client.containers.create(
            self.image,
            [*self.options, *arguments],
            name=f"{self.network.name}-{name}",
            hostname=name,
            environment={"SLIPWAY_HOSTS": hosts, **self.environment, **environment},
            network=self.network.name,
            networking_config={self.network.name: endpoint},
            volumes={self.network.name: {"bind": SHARED}},
            shm_size="2g",
            labels=LABELS,
        )
        self.containers[name] = container
        container.start()
        return container

    def wait(self, timeout: float = DEADLINE) -> dict[str, int]:
        """The exit status of each node."""
        return {name: container.wait(timeout=timeout)["StatusCode"] for name, container in self.containers.items()}

    def output(self, name: str) -> str:
        return self.containers[name].logs().decode()

    def outputs(self) -> str:
        return "\n".join(f"--- {name}\n{self.output(name)}" for name in self.containers)


@pytest.fixture
def job() -> Iterator[Callable[..., Job]]:
    image = os.environ.get("SLIPWAY_TEST_IMAGE")
    if not image:
        pytest.fail("SLIPWAY_TEST_IMAGE is not set: run these tests with `buildkit test --target cpu`")
    client = docker.from_env()
    jobs: list[Job] = []

    def make(size: int = 2, **environment: str) -> Job:
        network = client.networks.create(f"slipway-test-{secrets.token_hex(4)}", driver="bridge", labels=LABELS)
        client.volumes.create(str(network.name), labels=LABELS)
        # These containers have no GPU, so preflight would stop an image for GPUs.
        options = () if os.environ.get("SLIPWAY_TEST_TARGET", "cpu") == "cpu" else ("--no-preflight",)
        values = {"SLIPWAY_TOKEN": secrets.token_hex(16), "SLIPWAY_DEADLINE": "200", **environment}
        jobs.append(Job(client, image, network, size, values, options))
        return jobs[-1]

    yield make
    for job in jobs:
        for container in job.containers.values():
            container.remove(force=True)
        job.network.remove()
        client.volumes.get(job.network.name).remove()
