"""The real engines of this host. Each test builds and runs the cpu image, or says what is missing for that."""

import json
import os
import pwd
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from buildkit.host import read_host

ROOT = Path(__file__).parents[2]
INTEGRATED = "SLIPWAY_DOCKER_WITHOUT_BUILDX"
ROOTLESS = "SLIPWAY_ROOTLESS_USER"


@dataclass(frozen=True)
class Setting:
    """What makes `buildkit` and the engine's own command meet one engine: `prefix` comes before every command."""

    engine: str
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
        yield from rootless(folder)
    elif request.param == "docker":
        need("docker")
        yield Setting("docker")
    else:
        yield without_buildx(folder)


def need(program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")


def podman(folder: Path) -> Setting:
    """With limits that this process may give: podman's own are above those of many CI hosts."""
    need("podman")
    limits = [f"{name}={most}:{most}" for name, most in (("nofile", hard("NOFILE")), ("nproc", hard("NPROC") // 2))]
    runtime = "crun"
    if not Path("/sys/fs/cgroup/cgroup.controllers").exists():
        need("runc")
        runtime = "runc"  # crun wants cgroup v2 alone
    (folder / "containers.conf").write_text(
        f"[containers]\ndefault_ulimits = {json.dumps(limits)}\n"
        f'[engine]\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\nruntime = "{runtime}"\n'
    )
    (folder / "storage.conf").write_text('[storage]\ndriver = "overlay"\n')
    return Setting("podman", {"CONTAINERS_CONF": str(folder / "containers.conf")})


def hard(name: str) -> int:
    limit: int = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[1]
    return 2**20 if limit == resource.RLIM_INFINITY else limit


def rootless(folder: Path) -> Iterator[Setting]:
    """As the user that SLIPWAY_ROOTLESS_USER names, who has subordinate uids and nothing of root's."""
    name = os.environ.get(ROOTLESS)
    if name is None:
        pytest.skip(f"{ROOTLESS} names no user with lines in /etc/subuid and /etc/subgid")
    setting, user = podman(folder), pwd.getpwnam(name)
    home = Path(user.pw_dir)
    place = folder / "of-the-user"
    for path in (place, place / "run", place / "cache"):
        path.mkdir(mode=0o700)
        shutil.chown(path, user.pw_uid, user.pw_gid)
    for path in (folder, folder.parent, folder.parent.parent):
        path.chmod(0o755)
    variables = {
        **setting.variables,
        "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
        "HOME": str(home),
        "XDG_RUNTIME_DIR": str(place / "run"),
        "XDG_CACHE_HOME": str(place / "cache"),
        "TMPDIR": str(place),
        **as_variables(),
    }
    yield Setting("podman", variables, ("setpriv", f"--reuid={name}", f"--regid={user.pw_gid}", "--init-groups"))
    subprocess.run(
        [
            "setpriv",
            f"--reuid={name}",
            f"--regid={user.pw_gid}",
            "--init-groups",
            "podman",
            "system",
            "reset",
            "--force",
        ],
        env={**os.environ, **variables},
        check=False,
    )


def as_variables() -> dict[str, str]:
    """pip's settings of this user, whose files the other may not read."""
    host = read_host()
    values = {
        "UV_DEFAULT_INDEX": host.default_index or "",
        "UV_INDEX": " ".join(host.indexes),
        "UV_FIND_LINKS": ",".join(host.find_links),
        "UV_SSL_CERT_FILE": str(host.ca_bundle or ""),
    }
    return {name: value for name, value in values.items() if value}


def without_buildx(folder: Path) -> Setting:
    """A client of version 22 or older, with buildx, where it is installed, out of its sight."""
    client = os.environ.get(INTEGRATED)
    if client is None:
        pytest.skip(f"{INTEGRATED} names no docker client of version 22 or older")
    path = folder / "docker"
    path.write_text(f'#!/bin/sh\n[ "$1" = buildx ] && exit 1\nexec {client} "$@"\n')
    path.chmod(0o755)
    return Setting("docker", {"PATH": f"{folder}:{os.environ['PATH']}"})


@pytest.fixture(scope="session")
def buildkit(setting: Setting) -> Buildkit:
    def call(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        words = ["-c", "from buildkit.cli import main; main()", command, "--target", "cpu", "--engine", setting.engine]
        return setting.call(sys.executable, *words, *arguments)

    return call
