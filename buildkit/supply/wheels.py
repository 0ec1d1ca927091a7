"""Finds the wheels of a build that are already on this host."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from buildkit.host.settings import HostSettings
from buildkit.recipe.lock import Pin
from buildkit.supply.simple_index import local_offers


def local_wheels(pins: Iterable[Pin], host: HostSettings) -> list[Path]:
    """Wheels in the host's wheel folders and `file:` indexes with a locked sha256; each digest once."""
    wheels: dict[str, Path] = {}
    for pin in pins:
        for wheel in local_offers(pin.name, host):
            path = Path(wheel.location)
            digest = wheel.sha256 or sha256(path)
            if digest in pin.hashes:
                wheels.setdefault(digest, path)
    return sorted(wheels.values())


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
