"""The inventory of an image, read from the files in its layers: nothing of the image is run.

Debian packages come from dpkg's status file, wheels from their dist-info folders (core metadata 2.4,
https://packaging.python.org/en/latest/specifications/core-metadata/), everything else from /etc/slipway/image.json.
"""

import hashlib
import json
import re
import subprocess
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from email.parser import HeaderParser
from pathlib import PurePosixPath
from typing import Any, BinaryIO, cast

from packaging.utils import canonicalize_name

from buildkit.errors import InventoryError, LockError
from buildkit.recipe.lock import Lock, PackageChange, parse_lock
from buildkit.registry import compression

MANIFEST = "etc/slipway/image.json"
EXTENSION = "etc/slipway/extension.txt"  # the lock of what a user added
STATUS = "var/lib/dpkg/status"
RELEASE = "usr/lib/os-release"
METADATA = re.compile(r"opt/slipway/venv/lib/python[0-9.]+/site-packages/[^/]+\.dist-info/METADATA")
FIELD = re.compile(r"^([A-Za-z-]+): (.*)$", re.MULTILINE)
BLOCK = 2**20  # bytes read at once
LIMIT = 2**27  # bytes of memory for the relevant files of an image, and for one header of a tar
WHITEOUT, OPAQUE = ".wh.", ".wh..wh..opq"  # delete files of lower layers (OCI image specification, layer.md)

# Licence names in wheels' old `License:` field and classifiers that stand for exactly one SPDX identifier.
SPDX_NAMES = {
    "apache 2.0": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "apache software license 2.0": "Apache-2.0",
    "apache-2.0": "Apache-2.0",
    "bsd 3-clause": "BSD-3-Clause",
    "bsd 3-clause license": "BSD-3-Clause",
    "bsd-2-clause": "BSD-2-Clause",
    "bsd-3-clause": "BSD-3-Clause",
    "isc": "ISC",
    "isc license": "ISC",
    "mit": "MIT",
    "mit license": "MIT",
    "mpl-2.0": "MPL-2.0",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
    "psf-2.0": "PSF-2.0",
    "the mit license (mit)": "MIT",
}


@dataclass(frozen=True, order=True)
class InstalledWheel:
    """`license` is an SPDX expression. Without one it is empty, and `license_name` has the wheel's own wording."""

    name: str
    version: str
    license: str = ""
    license_name: str = ""


@dataclass(frozen=True, order=True)
class DebianPackage:
    """`source` and `source_version` name the source package from which it was built."""

    name: str
    version: str
    architecture: str
    source: str
    source_version: str


@dataclass(frozen=True)
class Inventory:
    """`manifest` is `/etc/slipway/image.json`; `system` and `release` are os-release's ID and VERSION_ID, or the
    codename of a release that has no number yet. `extension` is the lock of what a user added.
    """

    system: str
    release: str
    packages: tuple[DebianPackage, ...]
    wheels: tuple[InstalledWheel, ...]
    manifest: dict[str, Any] = field(default_factory=dict)
    extension: Lock = field(default_factory=Lock)

    @property
    def folders(self) -> dict[str, str]:
        """The digest of each folder of code that a user added, by its name."""
        added = self.manifest.get("extension")
        return dict(added.get("folders", {})) if isinstance(added, dict) else {}

    @property
    def base_changes(self) -> tuple[str, ...]:
        """Differences between the image's Debian packages and its lock, as text. Raises `InventoryError`."""
        try:
            changes = self.manifest.get("base", {}).get("changes", [])
            return tuple(str(PackageChange(**change)) for change in changes)
        except (AttributeError, TypeError) as error:
            raise InventoryError(f"/{MANIFEST} in the image: `base` is malformed", "build the image again") from error


def read_inventory(files: Mapping[str, bytes]) -> Inventory:
    """The inventory in the files that `apply_layer` kept. Raises `InventoryError` for an image of another tool."""
    for path in (MANIFEST, STATUS):
        if path not in files:
            raise InventoryError(f"the image has no /{path}", "only images from `buildkit build` have an inventory")
    try:
        manifest = json.loads(files[MANIFEST])
    except (ValueError, RecursionError) as error:
        raise InventoryError(f"/{MANIFEST} in the image: {error}", "build the image again") from error
    if not isinstance(manifest, dict):
        raise InventoryError(f"/{MANIFEST} in the image: not an object", "build the image again")
    try:
        extension = parse_lock(files.get(EXTENSION, b"").decode(errors="replace"))
    except LockError as error:
        raise InventoryError(f"/{EXTENSION} in the image: {error}", "build the image again") from error
    release = read_release(files.get(RELEASE, b"").decode(errors="replace"))
    wheels = sorted(
        read_wheel(text.decode(errors="replace")) for path, text in files.items() if METADATA.fullmatch(path)
    )
    return Inventory(
        system=release.get("ID", "linux"),
        release=release.get("VERSION_ID") or release.get("VERSION_CODENAME", ""),
        packages=tuple(sorted(read_packages(files[STATUS].decode(errors="replace")))),
        wheels=tuple(wheels),
        manifest=manifest,
        extension=extension,
    )


def apply_layer(files: dict[str, bytes], layer: BinaryIO) -> str:
    """The digest of a layer's tar (a diff id); `layer` may be compressed.

    Updates `files`, the relevant files of the lower layers, with those of the layer.
    Raises `InventoryError` when the layer cannot be read, or would need more memory than `LIMIT`.
    """
    stream = LayerStream(layer)
    try:
        with tarfile.open(fileobj=cast(BinaryIO, stream), mode="r:") as archive:
            for member in archive:
                vars(archive)["members"].clear()  # it would keep them all
                path = PurePosixPath(member.name.lstrip("/"))
                if path.name.startswith(WHITEOUT):
                    remove(files, path)
                elif wanted(str(path)):
                    files.pop(str(path), None)
                    if member.isfile() and (content := archive.extractfile(member)):
                        refuse_size(member.size + sum(map(len, files.values())), f"its {MANIFEST} and the like")
                        files[str(path)] = content.read()
        return stream.finish()
    except (tarfile.TarError, *compression.ERRORS) as error:
        raise InventoryError(f"a layer of the image is not a tar archive: {error}", "push the image again") from error


def refuse_size(size: int, purpose: str) -> None:
    if size > LIMIT:
        raise InventoryError(f"a layer of the image needs {size} bytes for {purpose}", "do not use this image")


class LayerStream:
    """A layer's tar, read once from front to back: what tarfile needs of a file. Holds at most a block of it."""

    def __init__(self, layer: BinaryIO) -> None:
        self._tar = compression.tar_of(layer)
        self._hash, self._position = hashlib.sha256(), 0

    def tell(self) -> int:
        return self._position

    def seek(self, position: int, _whence: int = 0) -> int:
        """Only forward, as tarfile does while it is iterated over."""
        while self._position < position and self.read(min(BLOCK, position - self._position)):
            pass
        return self._position

    def read(self, size: int) -> bytes:
        refuse_size(size, "one header")
        content = bytearray()
        while len(content) < size and (piece := self._tar.read(min(BLOCK, size - len(content)))):
            content += piece
        self._hash.update(content)
        self._position += len(content)
        return bytes(content)

    def finish(self) -> str:
        """The digest of the whole tar, whose rest is read."""
        while self.read(BLOCK):
            pass
        return f"sha256:{self._hash.hexdigest()}"


def read_local(binary: str, image: str) -> Inventory:
    """The inventory of an image in the engine's store. `binary` is the engine's client; nothing of the image is run."""
    created = subprocess.run([binary, "create", image, "true"], capture_output=True, text=True, check=False)
    if created.returncode != 0:
        raise InventoryError(f"there is no image {image}: {created.stderr.strip()}", "`buildkit build` makes one")
    container = created.stdout.strip()
    files: dict[str, bytes] = {}
    try:
        with subprocess.Popen([binary, "export", container], stdout=subprocess.PIPE) as export:
            apply_layer(files, cast(BinaryIO, export.stdout))
    finally:
        subprocess.run([binary, "rm", container], capture_output=True, check=False)
    return read_inventory(files)


def wanted(path: str) -> bool:
    return path in (MANIFEST, EXTENSION, STATUS, RELEASE) or METADATA.fullmatch(path) is not None


def remove(files: dict[str, bytes], whiteout: PurePosixPath) -> None:
    folder = whiteout.parent
    gone = folder if whiteout.name == OPAQUE else folder / whiteout.name.removeprefix(WHITEOUT)
    for path in [path for path in files if path == str(gone) or path.startswith(f"{gone}/")]:
        del files[path]


def read_release(text: str) -> dict[str, str]:
    lines = (line.partition("=") for line in text.splitlines())
    return {name: value.strip("\"'") for name, _, value in lines}


def read_packages(status: str) -> Iterator[DebianPackage]:
    """The installed packages of dpkg's status file (deb-control(5) paragraphs)."""
    for paragraph in status.split("\n\n"):
        fields = {match[1]: match[2] for match in FIELD.finditer(paragraph)}
        if not fields.get("Status", "").endswith(" ok installed"):  # `install`, or `hold`
            continue
        if missing := [name for name in ("Package", "Version", "Architecture") if not fields.get(name)]:
            raise InventoryError(f"/{STATUS} in the image: a package has no {missing[0]}", "build the image again")
        source, _, version = (fields.get("Source") or fields["Package"]).partition(" ")
        yield DebianPackage(
            fields["Package"],
            fields["Version"],
            fields["Architecture"],
            source,
            version.strip("()") or fields["Version"],
        )


def read_wheel(metadata: str) -> InstalledWheel:
    headers = HeaderParser().parsestr(metadata)
    if not headers["Name"] or not headers["Version"]:
        raise InventoryError("a wheel in the image has no name or no version", "build the image again")
    name, version = canonicalize_name(str(headers["Name"])), str(headers["Version"])
    if expression := headers["License-Expression"]:
        return InstalledWheel(name, version, expression)
    classifiers = [
        line.split(" :: ")[-1] for line in headers.get_all("Classifier", []) if line.startswith("License ::")
    ]
    named = [text for text in (headers["License"] or "", *classifiers) if text and "\n" not in text and len(text) < 80]
    known = {SPDX_NAMES[text.lower()] for text in named if text.lower() in SPDX_NAMES}
    if len(known) == 1:
        return InstalledWheel(name, version, known.pop())
    return InstalledWheel(name, version, "", named[0] if named else "")
