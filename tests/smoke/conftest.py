"""Containers of the image under test. `buildkit test` names it in SLIPWAY_TEST_IMAGE."""

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import docker
import pytest
import testinfra
from docker.models.containers import Container
from docker.models.images import Image
from testinfra.host import Host

LABELS = {"dev.slipway.test": os.environ.get("SLIPWAY_TEST_RUN", "")}  # `buildkit test` removes what has its own
INSTALLED = (  # without the names that a distribution stands for
    "import importlib.metadata as m, json, sys; sys.path.remove('/opt/slipway/app'); "
    "print(json.dumps({d.name: d.version for d in m.distributions()}))"
)


@pytest.fixture(scope="session")
def client() -> docker.DockerClient:
    return docker.from_env()


@pytest.fixture(scope="session")
def image(client: docker.DockerClient) -> Image:
    name = os.environ.get("SLIPWAY_TEST_IMAGE")
    if not name:
        pytest.fail("SLIPWAY_TEST_IMAGE is not set: run these tests with `buildkit test --target cpu`")
    return client.images.get(name)


@pytest.fixture(scope="session")
def target() -> str:
    return os.environ.get("SLIPWAY_TEST_TARGET", "cpu")


@pytest.fixture
def start(client: docker.DockerClient, image: Image) -> Iterator[Callable[..., Container]]:
    """Start containers of the image with these arguments of launch. The fixture removes them at the end."""
    started: list[Container] = []

    def start(*arguments: str, **options: Any) -> Container:
        container = client.containers.run(image.id, list(arguments), detach=True, labels=LABELS, **options)
        started.append(container)
        return container

    yield start
    for container in started:
        container.remove(force=True)


@pytest.fixture(scope="module")
def sleeper(client: docker.DockerClient, image: Image) -> Iterator[Container]:
    """A container that runs `sleep` under `launch`, for inspection."""
    container = client.containers.run(image.id, ["--no-ray", "--", "sleep", "3600"], detach=True, labels=LABELS)
    yield container
    container.remove(force=True)


@pytest.fixture(scope="module")
def host(sleeper: Container) -> Host:
    return testinfra.get_host(f"docker://{sleeper.id}")


@pytest.fixture(scope="module")
def manifest(host: Host) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(host.file("/etc/slipway/image.json").content_string)
    return content
