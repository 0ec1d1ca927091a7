"""Builds an image twice without cache, compares every byte and names the first file that differs.

Source: https://reproducible-builds.org/docs/definition/.
"""

import hashlib
import json
import secrets
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Protocol

from buildkit.images.archive import ImageArchive, estargz_archive, fixed_archive
from buildkit.images.build import BuildOptions, cache_folder, check_disk, prepared
from buildkit.images.plan import make_plan
from buildkit.recipe.lock import PackageChange
from buildkit.recipe.lock_file import read_lock
from buildkit.recipe.matrix import Matrix, Variant
from buildkit.registry.compression import COMPRESSIONS, tar_of
from buildkit.running.engine import BuildRequest, ContainerEngine, Docker
from buildkit.supply.base import bootstrap


@dataclass(frozen=True)
class Difference:
    """`layer` 1 is the base, 0 the image's configuration."""

    layer: int
    file: str
    first: str
    second: str

    @property
    def hint(self) -> str:
        return f"first build: {self.first}; second: {self.second}"


@dataclass(frozen=True)
class Verification:
    """`digests` are those of the two manifests; they are equal when there is no `difference`.

    `base_changes` are the Debian packages of both that differ from the lock, because the mirror had moved on.
    """

    target: str
    variant: str
    digests: tuple[str, str]
    difference: Difference | None
    seconds: float
    base_changes: tuple[PackageChange, ...] = ()


class ImageContent(Protocol):
    """An image to compare with: an archive here, or one in a registry."""

    @property
    def config(self) -> bytes: ...

    def layer_file(self, number: int) -> BinaryIO:
        """The tar of a layer, compressed or not; the base is layer 1."""


def verify_image(matrix: Matrix, variant: Variant, engine: ContainerEngine, base: str = "auto") -> Verification:
    """Builds everything twice from one lock and one checkout: a bootstrapped base, then the image.

    Raises a `BuildkitError` when the image cannot be built.
    """
    start = time.monotonic()
    lock = read_lock(matrix, variant)
    check_disk(matrix, variant, engine, make_plan(matrix, variant, lock, cache_folder()))
    with prepared(matrix, variant, engine, lock, BuildOptions(base)) as build, ExitStack() as stack:
        first, second = (stack.enter_context(fresh_archive(engine, build.request, lock.epoch)) for _ in range(2))
        difference = find_difference(first, second)
        if build.provider == "bootstrap" and difference is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="slipway-verify-"))
            again = bootstrap(variant, Path(folder), build.lock.debs, lock.epoch).tar
            difference = compare_layers(1, tar_files(build.request.context / "rootfs.tar"), tar_files(again))
        seconds = time.monotonic() - start
        digests = (first.digest, second.digest)
        return Verification(variant.target, variant.name, digests, difference, seconds, build.lock.changes)


def rebuild(
    matrix: Matrix, variant: Variant, engine: Docker, base: str, published: ImageContent, estargz: bool = False
) -> Difference | None:
    """The first difference between a published image and one built here without cache; None when they are equal.

    Layers of `estargz` are compared with their tables of contents, which depend on BuildKit's release.
    """
    lock = read_lock(matrix, variant)
    with prepared(matrix, variant, engine, lock, BuildOptions(base, only_locked=True)) as build:
        request = replace(build.request, no_cache=True)
        archives = (
            estargz_archive(engine, request, cache_folder()) if estargz else fresh_archive(engine, request, lock.epoch)
        )
        with archives as archive:
            return find_difference(published, archive)


@contextmanager
def fresh_archive(engine: ContainerEngine, request: BuildRequest, epoch: int) -> Iterator[ImageArchive]:
    """An image that is built without cache, with the times that `publish` gives it. The engine does not keep it."""
    tag = f"slipway:verify-{secrets.token_hex(6)}"
    try:
        engine.build(replace(request, tags=(tag,), no_cache=True))
        with fixed_archive(engine, tag, epoch, cache_folder(), COMPRESSIONS["zstd"]) as archive:
            yield archive
    finally:
        engine.call("rmi", tag)


def tar_files(path: Path) -> Iterator[tuple[str, str]]:
    with tarfile.open(path) as archive:
        yield from members(archive)


def members(archive: tarfile.TarFile) -> Iterator[tuple[str, str]]:
    for member in archive:
        content = archive.extractfile(member) if member.isreg() else None
        yield member.name, describe(member, content.read() if content else b"")


def describe(member: tarfile.TarInfo, content: bytes) -> str:
    sha256 = hashlib.sha256(content).hexdigest()[:12] if content else ""
    owner, time_set = f"{member.uid}:{member.gid}", int(member.mtime)
    words = f"mode {member.mode:o}, owner {owner}, time {time_set}, {member.size} bytes {sha256} {member.linkname}"
    return words.rstrip()


def find_difference(first: ImageContent, second: ImageContent) -> Difference | None:
    """The first file that differs, in the first layer that differs. Compression is no difference."""
    if first.config == second.config:
        return None
    left, right = json.loads(first.config), json.loads(second.config)
    layers = [config["rootfs"]["diff_ids"] for config in (left, right)]
    for number, (digest, other_digest) in enumerate(zip(*layers, strict=False), start=1):
        if digest != other_digest:
            difference = compare_layers(number, layer_files(first, number), layer_files(second, number))
            return difference or Difference(number, "the order of its files", digest, other_digest)
    key = next((key for key in sorted({*left, *right}) if left.get(key) != right.get(key)), "the form of its JSON")
    return Difference(0, f"{key} in the image's configuration", str(left.get(key)), str(right.get(key)))


def layer_files(image: ImageContent, number: int) -> Iterator[tuple[str, str]]:
    """Name and description of each file in a layer, in the layer's order."""
    with closing(image.layer_file(number)) as file, tarfile.open(fileobj=tar_of(file), mode="r|") as archive:
        yield from members(archive)


def compare_layers(
    number: int, first: Iterable[tuple[str, str]], second: Iterable[tuple[str, str]]
) -> Difference | None:
    """The first file, by name, that differs."""
    ones, others = dict(first), dict(second)
    for name in sorted({*ones, *others}):
        left, right = ones.get(name, "absent"), others.get(name, "absent")
        if left != right:
            return Difference(number, name, left, right)
    return None
