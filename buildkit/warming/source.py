"""Sources of warm caches, and the trust that each needs.

Its code runs in the job. A file is as trustworthy as its folder; of a registry, a tag can be moved by whoever may push.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from buildkit.errors import UsageError
from buildkit.registry.client import Registry
from buildkit.registry.credentials import read_credentials
from buildkit.registry.reference import Reference, parse_reference
from buildkit.registry.signature import Trust
from buildkit.warming.archive import read_cache, unpack
from buildkit.warming.artifact import pull
from buildkit.warming.cache import Key, WarmCache, name_of


@dataclass(frozen=True)
class Source:
    """An archive's file, or a repository with a tag or a digest. `key` is the public key that signed it there."""

    name: str
    key: str = ""
    ca: Path | None = None


def open_cache(source: Source, folder: Path, target: str, here: Key) -> tuple[WarmCache, Path]:
    """A warm cache and the folder in which it lies unpacked, below `folder`.

    In a repository without tag and digest, `here` chooses the tag. Raises `UsageError` if the source is neither file
    nor repository, if nobody vouches for it, or if a key is to vouch for a file; `TrustError` without a signature by
    the key; `WarmCacheError` for a damaged archive; `RegistryError`.
    """
    archive = Path(source.name)
    if not archive.is_file():
        archive = pulled(source, folder, target, here)
    elif source.key:
        raise UsageError(
            f"--warm {source.name} is a file, and only what lies in a registry is signed",
            "leave out --warm-key and SLIPWAY_WARM_KEY if you trust the file, or name the repository",
        )
    with archive.open("rb") as file:
        place = folder / hashlib.file_digest(file, "sha256").hexdigest()
    return (read_cache(archive) if place.is_dir() else unpack(archive, place)), place


def pulled(source: Source, folder: Path, target: str, here: Key) -> Path:
    """The archive from a repository, kept in `folder`."""
    reference = named_repository(source.name)
    if not (reference.digest or source.key):
        raise UsageError(
            f"--warm {source.name}: it is code that the job runs, and a tag can be moved",
            "name the digest that `buildkit warm --push` printed (REPOSITORY@sha256:…), or the key that signed it "
            "(--warm-key cosign.pub)",
        )
    registry = Registry(reference, read_credentials(reference.host), source.ca)
    trust = Trust(source.key) if source.key else None
    return pull(registry, reference.digest or reference.tag or name_of(target, here), folder, trust, source.ca)


def named_repository(source: str) -> Reference:
    """Raises `UsageError` for a path, or anything else that names no repository."""
    try:
        if not source.startswith((".", "/")):
            return parse_reference(source)
    except UsageError:
        pass
    raise UsageError(
        f"--warm {source}: there is no such file, and it names no repository",
        "name an archive of `buildkit warm`, or HOST[:PORT]/REPOSITORY[:TAG]",
    )
