"""The container engines: one small class around each command line. Other modules work with any of them.

Docker builds with BuildKit, through buildx or the client's integrated BuildKit. Podman builds with Buildah and needs
neither a daemon nor root. Their command lines are the same nearly everywhere.
"""

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from buildkit.errors import BuildError, EngineError, RegistryError, UsageError
from buildkit.host.accelerators import Flag
from buildkit.host.machine import Machine
from buildkit.running.formats import podman_flags

ANSWER_TIMEOUT = 30  # seconds for an engine to respond
INTEGRATED = 22  # the last major version of docker's client that builds with BuildKit without buildx


@dataclass(frozen=True)
class BuildRequest:
    """`secrets` maps an id to a file that the build can read and that stays out of the image.

    `stage` is the stage of the Dockerfile to build; the last one when empty. `output` is an exporter of BuildKit with
    its options; the engine's image store when empty.
    """

    context: Path
    tags: tuple[str, ...]
    secrets: dict[str, Path] = field(default_factory=dict)
    build_args: dict[str, str] = field(default_factory=dict)
    no_cache: bool = False
    progress: str = "auto"
    stage: str = ""
    output: str = ""


@dataclass(frozen=True)
class LocalImage:
    """`size` is in bytes, uncompressed."""

    id: str
    size: int
    labels: dict[str, str] = field(default_factory=dict)


class ContainerEngine(ABC):
    name: ClassVar[str]
    storage: ClassVar[str]  # template for `info` that prints the folder of images
    binary: str

    def __init__(self) -> None:
        """Raises `EngineError` when it is not installed or does not answer."""
        binary = shutil.which(self.name)
        if binary is None:
            raise EngineError(f"{self.name} is not installed", HINT)
        self.binary = binary
        done = self.call("info", "--format", self.storage, timeout=ANSWER_TIMEOUT)
        if done.returncode != 0 or not done.stdout.strip():
            words = done.stderr.strip() or "no output"
            raise EngineError(f"no container engine answers: {self.name}: {words}", HINT)
        self.storage_folder = Path(done.stdout.strip())

    @property
    def program(self) -> tuple[str, ...]:
        """The start of every command line of the engine."""
        return (self.binary,)

    def call(
        self, *arguments: str, environment: Mapping[str, str] | None = None, timeout: float | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end and captures both streams; `environment` is added to ours."""
        variables = {**os.environ, **(environment or {})}
        command = [*self.program, *arguments]
        return subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=timeout)

    @classmethod
    def flags(cls, flags: Sequence[Flag], _machine: Machine) -> tuple[Flag, ...]:
        """Docker's flags as this engine writes them."""
        return tuple(flags)

    @abstractmethod
    def build_command(self, request: BuildRequest) -> list[str]:
        """The command line of a build."""

    def build(self, request: BuildRequest) -> None:
        """Builds, with the engine's output on stderr. Raises `BuildError` with the command that failed."""
        command = self.build_command(request)
        proxies = {name: value for name, value in request.build_args.items() if is_proxy(name)}
        environment = {**os.environ, **proxies, "DOCKER_BUILDKIT": "1"}
        status = subprocess.run(command, env=environment, stdout=2, check=False).returncode
        if status != 0:
            raise BuildError(
                f"the build ended with status {status}: {shlex.join(command)}",
                "the last step above failed; existing images are unchanged. Repair what it names, then run the same "
                "`buildkit` command again: finished downloads are kept",
            )

    def push(self, reference: str) -> None:
        """Sends a tag to the registry in its name, with the engine's login. Raises `RegistryError`."""
        if subprocess.run([*self.program, "push", reference], stdout=2, check=False).returncode != 0:
            registry = reference.partition("/")[0]
            raise RegistryError(
                f"{self.name} could not push {reference}: its message is above",
                f"the image is built and tagged here; `{self.name} login {registry}`, then `{self.name} push` it",
            )

    def inspect(self, reference: str) -> dict[str, Any] | None:
        """The engine's description of a local image; None when there is no such image."""
        done = self.call("image", "inspect", reference)
        if done.returncode != 0:
            return None
        facts: dict[str, Any] = json.loads(done.stdout)[0]
        return facts

    def find(self, reference: str) -> LocalImage | None:
        facts = self.inspect(reference)
        return LocalImage(facts["Id"], facts["Size"], facts["Config"].get("Labels") or {}) if facts else None

    def read_file(self, reference: str, path: str) -> bytes:
        """A file of a local image, without starting a container. Raises `EngineError` when there is no such file."""
        created = self.call("create", reference, "none")
        container = created.stdout.strip()
        try:
            done = subprocess.run([*self.program, "cp", f"{container}:{path}", "-"], capture_output=True, check=False)
            with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
                file = archive.extractfile(archive.getmembers()[0])
                return file.read() if file else b""
        except (tarfile.TarError, IndexError) as error:
            raise EngineError(
                f"{self.name} cannot read {path} of {reference}: {created.stderr.strip()}", f"see `{self.name} images`"
            ) from error
        finally:
            self.call("rm", container)

    def free_bytes(self) -> int | None:
        """Free space in the engine's image storage; None when the engine runs on another machine."""
        folder = self.storage_folder
        return shutil.disk_usage(folder).free if folder.is_dir() else None


class Docker(ContainerEngine):
    name = "docker"
    storage = "{{.DockerRootDir}}"

    def build_command(self, request: BuildRequest) -> list[str]:
        """Without buildx it needs `DOCKER_BUILDKIT=1`. Raises `EngineError` when its builder is missing."""
        if self.has_buildx():
            output = ["--output", request.output] if request.output else ["--load"]
            command = [self.binary, "buildx", "build", *output, "--provenance=false"]
        else:
            self.check_integrated()
            command = [self.binary, "build"]
        command += [f"--progress={request.progress}", *common_options(request)]
        return [*command, str(request.context)]

    def has_buildx(self) -> bool:
        return self.call("buildx", "version").returncode == 0

    def check_oci_output(self) -> None:
        """Raises `EngineError` unless builds here can be written as OCI layouts."""
        store = self.call("info", "--format", "{{.DriverStatus}}").stdout
        if not (self.has_buildx() and "io.containerd.snapshotter" in store):
            raise EngineError(
                "eStargz layers need BuildKit's OCI output, which docker has with buildx and containerd's image store",
                'write {"features": {"containerd-snapshotter": true}} into /etc/docker/daemon.json and restart docker; '
                "`ci/engine` does so with SLIPWAY_IMAGE_STORE=containerd",
            )

    def check_integrated(self) -> None:
        version = self.call("version", "--format", "{{.Client.Version}}").stdout.strip()
        if (major := re.match(r"\d+", version)) and int(major[0]) > INTEGRATED:
            raise EngineError(
                f"docker's client {version} builds through buildx only, and buildx is not installed",
                BUILDX,
            )


class Podman(ContainerEngine):
    name = "podman"
    storage = "{{.Store.GraphRoot}}"

    def build_command(self, request: BuildRequest) -> list[str]:
        command = [self.binary, "build", "--layers", *common_options(request)]
        if date := request.build_args.get("SOURCE_DATE_EPOCH"):
            command.append(f"--timestamp={date}")
        return [*command, str(request.context)]

    @classmethod
    def flags(cls, flags: Sequence[Flag], machine: Machine) -> tuple[Flag, ...]:
        return podman_flags(flags, machine)


BUILDX = "install docker-buildx (Debian) or docker-buildx-plugin (Docker's own packages)"
ENGINES: dict[str, type[ContainerEngine]] = {engine.name: engine for engine in (Docker, Podman)}
HINT = "start one (`systemctl start docker`), or install Podman; on Debian `ci/engine COMMAND` starts Docker"


def common_options(request: BuildRequest) -> list[str]:
    options: list[str] = []
    for tag in request.tags:
        options += ["--tag", tag]
    for identifier, path in request.secrets.items():
        options += ["--secret", f"id={identifier},src={path}"]
    for name, value in request.build_args.items():
        # The engine reads a proxy from our environment: its password is in no list of processes and no message.
        options += ["--build-arg", name if is_proxy(name) else f"{name}={value}"]
    if request.no_cache:
        options.append("--no-cache")
    if request.stage:
        options += ["--target", request.stage]
    return options


def is_proxy(variable: str) -> bool:
    return variable.lower().endswith("_proxy")


def names_registry(reference: str) -> bool:
    first, slash, _ = reference.partition("/")
    return bool(slash) and ("." in first or ":" in first or first == "localhost")


def full_name(reference: str) -> str:
    """The reference with docker's default registry when it names none; podman has no default registry."""
    if names_registry(reference):
        return reference
    slash = "/" in reference
    return f"docker.io/{reference}" if slash else f"docker.io/library/{reference}"


def open_engine(name: str = "auto") -> ContainerEngine:
    """The named engine; `auto` takes the first that answers. Raises `EngineError` with the problem of each."""
    if name != "auto":
        if name not in ENGINES:
            raise UsageError(f"--engine {name}: unknown engine", f"one of: auto, {', '.join(ENGINES)}")
        return ENGINES[name]()
    refusals = []
    for engine in ENGINES.values():
        try:
            return engine()
        except EngineError as error:
            refusals.append(str(error))
    raise EngineError("; ".join(refusals), HINT)
