"""Finds the wheels of a lock that lie in folders on this host, so that a build can take them from its context."""

import hashlib
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from urllib.parse import unquote

from packaging.utils import InvalidSdistFilename, InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from buildkit.errors import MatrixError
from buildkit.host.settings import HostSettings
from buildkit.recipe.matrix import WheelLayer

PIN = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==(\S+)", re.MULTILINE)
HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
ANCHOR = re.compile(r'href="([^"#]+)(?:#sha256=([0-9a-f]{64}))?"')


def local_wheels(lock: str, host: HostSettings) -> list[Path]:
    """Wheels in the host's wheel folders and `file:` indexes whose sha256 the lock names; each digest once."""
    wanted = set(HASH.findall(lock))
    names: set[str] = {canonicalize_name(name) for name, _ in PIN.findall(lock)}
    found: dict[str, Path] = {}
    for path, known in (*from_folders(host.wheel_folders, names), *from_indexes(host.local_indexes, names)):
        digest = known or sha256(path)
        if digest in wanted:
            found.setdefault(digest, path)
    return sorted(found.values())


def from_folders(folders: Iterable[Path], names: set[str]) -> list[tuple[Path, str]]:
    wheels = [wheel for folder in folders if folder.is_dir() for wheel in sorted(folder.glob("*.whl"))]
    return [(wheel, "") for wheel in wheels if distribution(wheel) in names]


def from_indexes(indexes: Iterable[Path], names: set[str]) -> list[tuple[Path, str]]:
    """Pages of a simple index (PEP 503) on disk: `<index>/<name>/index.html` with links relative to the page."""
    found = []
    for page in (index / name / "index.html" for index in indexes for name in sorted(names)):
        if page.is_file():
            for link, digest in ANCHOR.findall(page.read_text()):
                path = (page.parent / unquote(link)).resolve()
                if path.suffix == ".whl" and path.is_file():
                    found.append((path, digest))
    return found


def distribution(wheel: Path) -> str:
    try:
        return parse_wheel_filename(wheel.name)[0]
    except (InvalidWheelFilename, InvalidSdistFilename):
        return ""


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def split_by_layer(lock: str, layers: Iterable[WheelLayer]) -> dict[str, str]:
    """A requirements file for each layer: a distribution lies in the first layer that names it."""
    starts = [*PIN.finditer(lock)]
    ends = [*(start.start() for start in starts[1:]), len(lock)]
    files = {layer.name: "" for layer in layers}
    for start, end in zip(starts, ends, strict=True):
        name = layer_of(start[1], layers)
        files[name] += lock[start.start() : end]
    return files


def layer_of(distribution: str, layers: Iterable[WheelLayer]) -> str:
    for layer in layers:
        if any(fnmatchcase(canonicalize_name(distribution), pattern) for pattern in layer.distributions):
            return layer.name
    raise MatrixError(
        f"images/matrix.toml: no wheel layer holds {distribution}", 'end the list of [[wheel_layers]] with one of ["*"]'
    )
