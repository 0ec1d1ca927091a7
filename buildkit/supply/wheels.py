"""Chooses the wheels of a build: those already on this host, and those of each image layer."""

import hashlib
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from packaging.utils import canonicalize_name

from buildkit.errors import MatrixError
from buildkit.host.settings import HostSettings
from buildkit.recipe.lock import Pin
from buildkit.recipe.matrix import WheelLayer
from buildkit.supply.simple_index import local_offers


def local_wheels(pins: Iterable[Pin], host: HostSettings) -> list[Path]:
    """Wheels in the host's wheel folders and `file:` indexes with a locked sha256; each digest once."""
    found: dict[str, Path] = {}
    for pin in pins:
        for wheel in local_offers(pin.name, host):
            path = Path(wheel.location)
            digest = wheel.sha256 or sha256(path)
            if digest in pin.hashes:
                found.setdefault(digest, path)
    return sorted(found.values())


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def split_by_layer(pins: Iterable[Pin], layers: Iterable[WheelLayer]) -> dict[str, list[Pin]]:
    """The pins of each layer; a distribution goes into the first layer with a matching pattern."""
    split: dict[str, list[Pin]] = {layer.name: [] for layer in layers}
    for pin in pins:
        split[layer_of(pin.name, layers)].append(pin)
    return split


def layer_of(distribution: str, layers: Iterable[WheelLayer]) -> str:
    for layer in layers:
        if any(fnmatchcase(canonicalize_name(distribution), pattern) for pattern in layer.distributions):
            return layer.name
    raise MatrixError(
        f"images/matrix.toml: no wheel layer matches {distribution}", 'let the last of [[wheel_layers]] match ["*"]'
    )
