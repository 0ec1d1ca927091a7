"""Finds the wheels of a lock that lie in folders on this host, so that a build can take them from its context."""

import hashlib
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from packaging.utils import canonicalize_name

from buildkit.errors import MatrixError
from buildkit.host.settings import HostSettings
from buildkit.recipe.matrix import WheelLayer
from buildkit.supply.simple_index import local_wheels_of

PIN = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==(\S+)", re.MULTILINE)
HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


def local_wheels(lock: str, host: HostSettings) -> list[Path]:
    """Wheels in the host's wheel folders and `file:` indexes whose sha256 the lock names; each digest once."""
    wanted = set(HASH.findall(lock))
    names: set[str] = {canonicalize_name(name) for name, _ in PIN.findall(lock)}
    found: dict[str, Path] = {}
    for name in sorted(names):
        for wheel in local_wheels_of(name, host):
            path = Path(wheel.location)
            digest = wheel.sha256 or sha256(path)
            if digest in wanted:
                found.setdefault(digest, path)
    return sorted(found.values())


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
