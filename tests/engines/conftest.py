"""The real engines of this host. Each test builds and runs the cpu image, or says what is missing for that."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INTEGRATED = "SLIPWAY_DOCKER_WITHOUT_BUILDX"

Buildkit = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session", params=["docker", "docker-without-buildx", "podman"])
def environment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Variables under which `buildkit` finds one engine and no other. SLIPWAY_ENGINE is its name."""
    folder = tmp_path_factory.mktemp("engine")
    if request.param == "podman":
        yield podman(folder)
    elif request.param == "docker":
        need("docker")
        yield {"SLIPWAY_ENGINE": "docker"}
    else:
        yield without_buildx(folder)


def need(program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")


def podman(folder: Path) -> dict[str, str]:
    need("podman")
    settings = '[engine]\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
    if not Path("/sys/fs/cgroup/cgroup.controllers").exists():
        need("runc")
        settings += 'runtime = "runc"\n'  # crun wants cgroup v2 alone
    (folder / "containers.conf").write_text(settings)
    return {"SLIPWAY_ENGINE": "podman", "CONTAINERS_CONF": str(folder / "containers.conf")}


def without_buildx(folder: Path) -> dict[str, str]:
    """A client of version 22 or older, with buildx, where it is installed, out of its sight."""
    client = os.environ.get(INTEGRATED)
    if client is None:
        pytest.skip(f"{INTEGRATED} names no docker client of version 22 or older")
    path = folder / "docker"
    path.write_text(f'#!/bin/sh\n[ "$1" = buildx ] && exit 1\nexec {client} "$@"\n')
    path.chmod(0o755)
    return {"SLIPWAY_ENGINE": "docker", "PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.fixture(scope="session")
def buildkit(environment: dict[str, str]) -> Buildkit:
    def call(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-c", "from buildkit.cli import main; main()", command, "--target", "cpu"]
        words += ["--engine", environment["SLIPWAY_ENGINE"], *arguments]
        return subprocess.run(
            words, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False
        )

    return call
