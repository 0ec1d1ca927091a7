"""The container engine: builds go through its command line (the SDK has only the classic builder), the rest its SDK."""

import os
import shlex
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import docker
from docker.errors import DockerException, ImageNotFound
from docker.models.images import Image

from buildkit.errors import BuildError, EngineError

PULL_TIMEOUT = 20  # seconds until a registry that does not answer counts as absent


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


class Engine:
    """Docker, with BuildKit through buildx where it is installed and through the integrated client where it is not."""

    def __init__(self) -> None:
        """Raises `EngineError` when no engine answers."""
        hint = "start one (`systemctl start docker`); on Debian `ci/engine COMMAND` installs and starts one"
        binary = shutil.which("docker")
        if binary is None:
            raise EngineError("docker is not installed", hint)
        try:
            self.client = docker.from_env(timeout=120)
            self.client.ping()
        except DockerException as error:
            raise EngineError(f"no container engine answers: {error}", hint) from error
        self.binary = binary

    def build_command(self, request: BuildRequest) -> list[str]:
        """The command line of a build; it needs `DOCKER_BUILDKIT=1` where buildx is absent."""
        if request.archive:
            output = f"type=oci,dest={request.archive},rewrite-timestamp=true"
            command = [self.binary, "buildx", "build", "--provenance=false", f"--output={output}"]
        elif self.has_buildx():
            command = [self.binary, "buildx", "build", "--load", "--provenance=false"]
        else:
            command = [self.binary, "build"]
        command += [f"--progress={request.progress}"]
        for tag in request.tags:
            command += ["--tag", tag]
        for identifier, path in request.secrets.items():
            command += ["--secret", f"id={identifier},src={path}"]
        for name, value in request.build_args.items():
            command += ["--build-arg", f"{name}={value}"]
        if request.no_cache:
            command.append("--no-cache")
        return [*command, str(request.context)]

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

    def has_buildx(self) -> bool:
        return subprocess.run([self.binary, "buildx", "version"], capture_output=True, check=False).returncode == 0

    def can_pull(self, reference: str) -> bool:
        """Whether the image is here already or its registry answers for it."""
        if self.find(reference):
            return True
        command = [self.binary, "manifest", "inspect", reference]
        try:
            return subprocess.run(command, capture_output=True, check=False, timeout=PULL_TIMEOUT).returncode == 0
        except subprocess.TimeoutExpired:
            return False

    def find(self, reference: str) -> Image | None:
        try:
            return self.client.images.get(reference)
        except ImageNotFound:
            return None

    def free_bytes(self) -> int | None:
        """Free space where the engine keeps images; None when the engine is on another machine."""
        root = Path(self.client.info()["DockerRootDir"])
        return shutil.disk_usage(root).free if root.is_dir() else None
