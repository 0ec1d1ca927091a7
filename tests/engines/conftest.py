"""The real engines of this host. Each test builds and runs the cpu image, or names what is missing."""

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from buildkit.host.settings import read_host
from tests.publish.conftest import Server
from tests.serving import free_port

ROOT = Path(__file__).parents[2]
INTEGRATED = "SLIPWAY_DOCKER_WITHOUT_BUILDX"
ROOTLESS = "SLIPWAY_ROOTLESS_USER"
CAP_SYS_RESOURCE = 24


@dataclass(frozen=True)
class Setting:
    """Settings with which `buildkit` and the engine's command reach one engine; `prefix` precedes every command.

    `folder` belongs to the user as whom the engine runs.
    """

    engine: str
    folder: Path
    variables: dict[str, str] = field(default_factory=dict)
    prefix: tuple[str, ...] = ()

    def call(self, *command: str) -> subprocess.CompletedProcess[str]:
        variables = {**os.environ, **self.variables}
        return subprocess.run(
            [*self.prefix, *command], cwd=ROOT, env=variables, capture_output=True, text=True, check=False
        )


Buildkit = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session", params=["docker", "docker-without-buildx", "podman", "podman-rootless"])
def setting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    folder = tmp_path_factory.mktemp("engine")
    if request.param == "podman":
        yield podman(folder)
    elif request.param == "podman-rootless":
        yield from rootless()
    elif request.param == "docker":
        need("docker")
        yield Setting("docker", folder)
    else:
        yield without_buildx(folder)


def need(program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")


def podman(folder: Path) -> Setting:
    """Podman as root. It ignores `--ulimit` and gives containers higher limits than its own."""
    if not capable(CAP_SYS_RESOURCE):
        pytest.skip("podman as root needs CAP_SYS_RESOURCE, which this process lacks")
    return Setting("podman", folder, settings_of(folder))


def settings_of(folder: Path) -> dict[str, str]:
    """podman's settings for a host without systemd."""
    need("podman")
    runtime = "crun"
    if not Path("/sys/fs/cgroup/cgroup.controllers").exists():
        need("runc")
        runtime = "runc"  # crun wants cgroup v2 alone
    engine = f'cgroup_manager = "cgroupfs"\nevents_logger = "file"\nruntime = "{runtime}"\n'
    (folder / "containers.conf").write_text(f"[engine]\n{engine}")
    (folder / "storage.conf").write_text('[storage]\ndriver = "overlay"\n')
    return {"CONTAINERS_CONF": str(folder / "containers.conf")}


def capable(capability: int) -> bool:
    """Whether this process has the Linux capability of that number."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapEff:"))
    return bool(int(line.split()[1], 16) >> capability & 1)


def rootless() -> Iterator[Setting]:
    """Podman as the user of SLIPWAY_ROOTLESS_USER, who has subordinate uids."""
    name = os.environ.get(ROOTLESS)
    if name is None:
        pytest.skip(f"{ROOTLESS} names no user with lines in /etc/subuid and /etc/subgid")
    user = pwd.getpwnam(name)
    with tempfile.TemporaryDirectory(prefix="slipway-rootless-") as folder:  # pytest's own are root's alone
        place = Path(folder)
        place.chmod(0o755)  # for mmdebstrap, whose root is another of the user's uids
        variables = {
            **settings_of(place),
            "CONTAINERS_STORAGE_CONF": str(place / "storage.conf"),
            "HOME": str(place / "home"),
            "XDG_RUNTIME_DIR": str(place / "run"),
            "XDG_CACHE_HOME": str(place / "cache"),
            "TMPDIR": str(place / "temporary"),
            **as_variables(),
        }
        for owned in ("home", "run", "cache", "temporary"):
            (place / owned).mkdir()
            shutil.chown(place / owned, user.pw_uid, user.pw_gid)
        prefix = ("setpriv", f"--reuid={name}", f"--regid={user.pw_gid}", "--init-groups")
        yield (setting := Setting("podman", place / "home", variables, prefix))
        setting.call("podman", "system", "reset", "--force")


def as_variables() -> dict[str, str]:
    """This user's pip settings as variables, because the other user cannot read the files."""
    host = read_host()
    values = {
        "UV_DEFAULT_INDEX": host.default_index or "",
        "UV_INDEX": " ".join(host.indexes),
        "UV_FIND_LINKS": ",".join(host.find_links),
        "UV_SSL_CERT_FILE": str(host.ca_bundle or ""),
    }
    return {name: value for name, value in values.items() if value}


def without_buildx(folder: Path) -> Setting:
    """A client of version 22 or older that cannot see buildx."""
    client = os.environ.get(INTEGRATED)
    if client is None:
        pytest.skip(f"{INTEGRATED} names no docker client of version 22 or older")
    path = folder / "docker"
    path.write_text(f'#!/bin/sh\n[ "$1" = buildx ] && exit 1\nexec {client} "$@"\n')
    path.chmod(0o755)
    return Setting("docker", folder, {"PATH": f"{folder}:{os.environ['PATH']}"})


@pytest.fixture(scope="session")
def buildkit(setting: Setting) -> Buildkit:
    def call(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        words = ["-c", "from buildkit.cli import main; main()", command, "--target", "cpu", "--engine", setting.engine]
        return setting.call(sys.executable, *words, *arguments)

    return call


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    for program in ("docker", "docker-registry", "mmdebstrap"):
        need(program)
    port = free_port()
    plain = {"http": {"addr": f"127.0.0.1:{port}"}}  # engines trust a loopback registry without TLS
    folder = tmp_path / "registry"
    folder.mkdir()
    server = Server(folder, port, Path(), plain)
    server.start()
    yield server
    server.kill()
