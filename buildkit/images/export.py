"""Writes a built image to a file, for machines without a registry or an engine.

| format | file | read by |
| --- | --- | --- |
| `docker` | docker archive | `docker load`, `podman load` |
| `oci` | OCI layout in a tar | `skopeo`, `podman load`, registries' tools |
| `squashfs` | root file system as enroot makes it | `enroot create`, pyxis |
| `sif` | Singularity image | `apptainer run`; needs apptainer here |

A file is complete or absent: it is written under another name and renamed at the end.
"""

import contextlib
import io
import shlex
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from buildkit.errors import ExportError
from buildkit.running.engine import ContainerEngine
from buildkit.running.nodes import ask, ask_quietly

SQUASHFS = ("sqfstar", "-quiet", "-no-progress", "-comp", "zstd", "-mkfs-time", "0")

# The script that enroot runs in the container (https://github.com/NVIDIA/enroot/blob/master/doc/image-format.md).
RC = """mkdir -p {folder} 2> /dev/null
cd {folder} && unset OLDPWD || exit 1

if [ -s /etc/rc.local ]; then
    . /etc/rc.local
fi

exec {entrypoint} "$@"
"""


def export_image(engine: ContainerEngine, image: str, form: str, path: Path) -> int:
    """Writes the file and returns its size in bytes. Raises `ExportError` for a missing image, tool, or space."""
    local = engine.find(image)
    if local is None:
        raise ExportError(f"there is no image {image}", "build it first, or name another with --image")
    free = shutil.disk_usage(path.parent).free
    if free < local.size:
        raise ExportError(
            f"{free / 2**30:.1f} GiB free in {path.parent}; the image has {local.size / 2**30:.1f} GiB",
            "choose another --output",
        )
    with partial(path) as unfinished:
        FORMATS[form](engine, image, unfinished)
        unfinished.replace(path)
    return path.stat().st_size


@contextlib.contextmanager
def partial(path: Path) -> Iterator[Path]:
    unfinished = path.with_name(path.name + ".partial")
    try:
        yield unfinished
    finally:
        unfinished.unlink(missing_ok=True)


def save_docker(engine: ContainerEngine, image: str, path: Path) -> None:
    form = ("--format", "docker-archive") if engine.name == "podman" else ()
    ask(engine, "save", *form, "--output", str(path), image)


def save_oci(engine: ContainerEngine, image: str, path: Path) -> None:
    """Since version 25, docker's archives are OCI layouts, too; skopeo converts older ones."""
    if engine.name == "podman":
        ask(engine, "save", "--format", "oci-archive", "--output", str(path), image)
        return
    save_docker(engine, image, path)
    if has_member(path, "oci-layout"):
        return
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        archive = path.rename(Path(folder) / "docker.tar")
        run_tool("skopeo", "copy", "--quiet", f"docker-archive:{archive}", f"oci-archive:{path}:latest")


def has_member(archive: Path, name: str) -> bool:
    with tarfile.open(archive) as tar:
        return name in tar.getnames()


def save_sif(engine: ContainerEngine, image: str, path: Path) -> None:
    require("apptainer", "install it where the image is, or export `docker` and run `apptainer build` where it is")
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        archive = Path(folder) / "image.tar"
        save_docker(engine, image, archive)
        run_tool("apptainer", "build", "--force", str(path), f"docker-archive:{archive}")


def save_squashfs(engine: ContainerEngine, image: str, path: Path) -> None:
    """The flattened root file system, with the image's environment and entrypoint in the files that enroot reads."""
    require(SQUASHFS[0], "install squashfs-tools 4.5 or newer (`apt-get install squashfs-tools`)")
    facts = engine.inspect(image)
    config = facts["Config"] if facts else {}
    container = ask(engine, "create", image)
    try:
        stream_tree([*engine.program, "export", container], [*SQUASHFS, str(path)], enroot_files(config))
    finally:
        ask_quietly(engine, "rm", "--force", container)


def stream_tree(source: list[str], sink: list[str], files: dict[str, str]) -> None:
    """Pipes a tar stream from one program to another and adds `files` to it."""
    with (
        subprocess.Popen(source, stdout=subprocess.PIPE) as reader,
        subprocess.Popen(sink, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as writer,
    ):
        assert reader.stdout is not None
        assert writer.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the sink ended early; its status tells why
            copy_tree(reader.stdout, writer.stdin, files)
            writer.stdin.close()
    if reader.returncode or writer.returncode:
        raise ExportError(f"{source[0]} or {sink[0]} failed", "see their messages above")


def enroot_files(config: dict[str, Any]) -> dict[str, str]:
    words = [*(config.get("Entrypoint") or ()), *(config.get("Cmd") or ())]
    folder = shlex.quote(config.get("WorkingDir") or "/")
    environment = "".join(f"{variable}\n" for variable in config.get("Env") or ())
    return {
        "etc/rc": RC.format(folder=folder, entrypoint=shlex.join(words)),
        "etc/environment": environment,
        "etc/fstab": "",
    }


def copy_tree(source: IO[bytes], sink: IO[bytes], files: dict[str, str]) -> None:
    """Copies a tar stream; `files` replace or extend its members, owned by root and readable by all."""
    with tarfile.open(fileobj=source, mode="r|") as old, tarfile.open(fileobj=sink, mode="w|") as new:
        for member in old:
            if member.name.removeprefix("./") in files:
                continue
            new.addfile(member, old.extractfile(member) if member.isreg() else None)
        for name, text in files.items():
            content = text.encode()
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), 0o755 if name == "etc/rc" else 0o644
            new.addfile(info, io.BytesIO(content))


def require(tool: str, hint: str) -> None:
    if shutil.which(tool) is None:
        raise ExportError(f"{tool} is not installed", hint)


def run_tool(*command: str) -> None:
    require(command[0], f"install {command[0]}")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ExportError(f"{command[0]} failed: {done.stderr.strip()}", "see its message")


FORMATS: dict[str, Callable[[ContainerEngine, str, Path], None]] = {
    "docker": save_docker,
    "oci": save_oci,
    "squashfs": save_squashfs,
    "sif": save_sif,
}
SUFFIXES = {"docker": ".docker.tar", "oci": ".oci.tar", "squashfs": ".sqsh", "sif": ".sif"}
