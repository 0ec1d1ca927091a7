"""The container engines. Each is one small class around its own command line; the rest never asks which it is.

Docker builds with BuildKit: through buildx, or through the client's integrated one where that is all there is. Podman
builds with Buildah, needs no daemon, and as a user no root. Both take the same words nearly everywhere.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from buildkit.errors import BuildError, EngineError, UsageError
from buildkit.host.accelerators import Flag
from buildkit.host.machine import Machine
from buildkit.running.formats import podman_flags

ANSWER_TIMEOUT = 30  # seconds for an engine to say that it is there
INTEGRATED = 22  # the last major version of docker's client that builds with BuildKit without buildx


@dataclass(frozen=True)
class BuildRequest:
    """`secrets` maps an id to a file whose content the build may read and never keeps.

    With `archive` the image goes into that file, an OCI archive with every time set to SOURCE_DATE_EPOCH or older.
    """

    context: Path
    tags: tuple[str, ...]
    secrets: dict[str, Path] = field(default_factory=dict)
    build_args: dict[str, str] = field(default_factory=dict)
    no_cache: bool = False
    progress: str = "auto"
    archive: Path | None = None


@dataclass(frozen=True)
class LocalImage:
    """`size` is in bytes, uncompressed."""

    id: str
    size: int
    labels: dict[str, str] = field(default_factory=dict)


class ContainerEngine(ABC):
    name: ClassVar[str]
    storage: ClassVar[str]  # the field of `info` that says where images are kept
    binary: str

    def __init__(self) -> None:
        """Raises `EngineError` when it is not installed or does not answer."""
        binary = shutil.which(self.name)
        if binary is None:
            raise EngineError(f"{self.name} is not installed", HINT)
        self.binary = binary
        done = self.call("info", "--format", self.storage, timeout=ANSWER_TIMEOUT)
        if done.returncode != 0 or not done.stdout.strip():
            words = done.stderr.strip() or "it says nothing"
            raise EngineError(f"no container engine answers: {self.name}: {words}", HINT)
        self.storage_folder = Path(done.stdout.strip())

    @property
    def program(self) -> tuple[str, ...]:
        """The words that every command line of the engine begins with."""
        return (self.binary,)

    def call(
        self, *arguments: str, environment: Mapping[str, str] | None = None, timeout: float | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs one command to its end and keeps both of its streams; `environment` comes on top of ours."""
        variables = {**os.environ, **(environment or {})}
        command = [*self.program, *arguments]
        return subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=timeout)

    @classmethod
    def flags(cls, flags: Iterable[Flag], _machine: Machine) -> tuple[Flag, ...]:
        """Flags in the engine's own words."""
        return tuple(flags)

    @abstractmethod
    def build_command(self, request: BuildRequest) -> list[str]:
        """The command line of a build."""

    def build(self, request: BuildRequest) -> None:
        """Raises `BuildError` with the command that failed; the engine's own output is on stderr by then."""
        command = self.build_command(request)
        environment = {**os.environ, "DOCKER_BUILDKIT": "1"}
        status = subprocess.run(command, env=environment, stdout=2, check=False).returncode
        if status != 0:
            raise BuildError(
                f"the build ended with status {status}: {shlex.join(command)}",
                "the failing step is the last one above; the images that were there before are untouched",
            )

    def inspect(self, reference: str) -> dict[str, Any] | None:
        """All that the engine knows of an image; None when it is not here."""
        done = self.call("image", "inspect", reference)
        if done.returncode != 0:
            return None
        facts: dict[str, Any] = json.loads(done.stdout)[0]
        return facts

    def find(self, reference: str) -> LocalImage | None:
        facts = self.inspect(reference)
        return LocalImage(facts["Id"], facts["Size"], facts["Config"].get("Labels") or {}) if facts else None

    def free_bytes(self) -> int | None:
        """Free space where the engine keeps images; None when the engine is on another machine."""
        folder = self.storage_folder
        return shutil.disk_usage(folder).free if folder.is_dir() else None


class Docker(ContainerEngine):
    name = "docker"
    storage = "{{.DockerRootDir}}"

    def build_command(self, request: BuildRequest) -> list[str]:
        """It needs `DOCKER_BUILDKIT=1` where buildx is absent. Raises `EngineError` without the builder it needs."""
        if request.archive:
            self.check_archive()
            command = [self.binary, "buildx", "build", "--provenance=false"]
            command.append(f"--output=type=oci,dest={request.archive},rewrite-timestamp=true,{AS_IT_IS}")
        elif self.has_buildx():
            command = [self.binary, "buildx", "build", "--load", "--provenance=false"]
        else:
            self.check_integrated()
            command = [self.binary, "build"]
        command += [f"--progress={request.progress}", *common_options(request)]
        return [*command, str(request.context)]

    def has_buildx(self) -> bool:
        return self.call("buildx", "version").returncode == 0

    def check_archive(self) -> None:
        if not self.has_buildx():
            raise EngineError("only buildx writes the same bytes twice, and buildx is not installed", BUILDX)
        if "io.containerd.snapshotter" not in self.call("info", "--format", "{{json .DriverStatus}}").stdout:
            raise EngineError(
                "docker keeps its images in its old store, which cannot write archives with fixed times",
                'put {"features": {"containerd-snapshotter": true}} into /etc/docker/daemon.json and restart docker; '
                "`SLIPWAY_IMAGE_STORE=containerd ci/engine COMMAND` starts one that has it",
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
        if request.archive:
            raise EngineError("podman's builds are not the same bytes twice", "use --engine docker, with buildx")
        command = [self.binary, "build", "--layers", *common_options(request)]
        if date := request.build_args.get("SOURCE_DATE_EPOCH"):
            command.append(f"--timestamp={date}")
        return [*command, str(request.context)]

    @classmethod
    def flags(cls, flags: Iterable[Flag], machine: Machine) -> tuple[Flag, ...]:
        return podman_flags(flags, machine)


AS_IT_IS = "compression=uncompressed,force-compression=true"  # an archive to compare need not be small
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
        options += ["--build-arg", f"{name}={value}"]
    if request.no_cache:
        options.append("--no-cache")
    return options


def full_name(reference: str) -> str:
    """With the registry that docker means when none is named; podman asks no registry by itself."""
    first, slash, _ = reference.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        return reference
    return f"docker.io/{reference}" if slash else f"docker.io/library/{reference}"


def open_engine(name: str = "auto") -> ContainerEngine:
    """The engine of that name; `auto` takes the first that answers. Raises `EngineError` with each refusal."""
    if name != "auto":
        if name not in ENGINES:
            raise UsageError(f"--engine {name}: there is no such engine", f"one of: auto, {', '.join(ENGINES)}")
        return ENGINES[name]()
    refusals = []
    for engine in ENGINES.values():
        try:
            return engine()
        except EngineError as error:
            refusals.append(str(error))
    raise EngineError("; ".join(refusals), HINT)
