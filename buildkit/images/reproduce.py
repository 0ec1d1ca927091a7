"""Builds an image twice without cache, compares every byte and names the first file that differs.

Source: https://reproducible-builds.org/docs/definition/ and BuildKit's `SOURCE_DATE_EPOCH` and `rewrite-timestamp`
(https://github.com/moby/buildkit/blob/master/docs/build-repro.md).
"""

import hashlib
import json
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from buildkit.errors import BuildError
from buildkit.images.build import cache_folder, check_disk, prepared
from buildkit.images.plan import make_plan
from buildkit.recipe.lock_file import read_lock
from buildkit.recipe.matrix import Matrix, Variant
from buildkit.running.engine import ContainerEngine
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
    """`digests` are those of the two manifests; they are equal when there is no `difference`."""

    target: str
    variant: str
    digests: tuple[str, str]
    difference: Difference | None
    seconds: float


def verify_image(matrix: Matrix, variant: Variant, engine: ContainerEngine, base: str = "auto") -> Verification:
    """Builds everything twice from one lock and one checkout: a bootstrapped base, then the image.

    Raises a `BuildkitError` when the image cannot be built, or cannot be exported with fixed times.
    """
    start = time.monotonic()
    lock = read_lock(matrix, variant)
    check_disk(matrix, variant, engine, make_plan(matrix, variant, lock, cache_folder()))
    with (
        tempfile.TemporaryDirectory(prefix="slipway-verify-") as folder,
        prepared(matrix, variant, engine, lock, base) as (request, provider),
    ):
        archives = [Path(folder, f"{number}.tar") for number in (1, 2)]
        for archive in archives:
            engine.build(replace(request, archive=archive, no_cache=True))
        first, second = map(OciLayout, archives)
        difference = None if first.digest == second.digest else find_difference(first, second)
        if provider == "bootstrap" and difference is None:
            again = bootstrap(variant, Path(folder), lock.debs, lock.epoch).tar
            difference = compare_layers(1, tar_files(request.context / "rootfs.tar"), tar_files(again))
        return Verification(
            variant.target, variant.name, (first.digest, second.digest), difference, time.monotonic() - start
        )


class OciLayout:
    """An OCI image layout in a tar (https://github.com/opencontainers/image-spec/blob/main/image-layout.md)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        index = json.loads(self.read("index.json"))
        self.digest: str = index["manifests"][0]["digest"]
        self.manifest = self.blob(self.digest)
        if "manifests" in self.manifest:
            self.manifest = self.blob(self.manifest["manifests"][0]["digest"])

    def read(self, name: str) -> bytes:
        with tarfile.open(self.path) as archive:
            file = archive.extractfile(name)
            if file is None:
                raise BuildError(f"the exported image has no {name}", "run `buildkit verify` again")
            return file.read()

    def blob(self, digest: str) -> Any:
        return json.loads(self.read(f"blobs/{digest.replace(':', '/')}"))

    @property
    def layers(self) -> list[str]:
        return [layer["digest"] for layer in self.manifest["layers"]]

    def files(self, digest: str) -> Iterator[tuple[str, str]]:
        """Name and description of each file in a layer, in the layer's order."""
        with tarfile.open(self.path) as archive:
            blob = archive.extractfile(f"blobs/{digest.replace(':', '/')}")
            with tarfile.open(fileobj=blob, mode="r|*") as layer:
                yield from members(layer)


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


def find_difference(first: OciLayout, second: OciLayout) -> Difference:
    """The first file that differs, in the first layer that differs."""
    for number, (one, other) in enumerate(zip(first.layers, second.layers, strict=False), start=1):
        if one == other:
            continue
        found = compare_layers(number, first.files(one), second.files(other))
        return found or Difference(number, "the order or compression of its files", one, other)
    left, right = (layout.blob(layout.manifest["config"]["digest"]) for layout in (first, second))
    key = next((key for key in sorted({*left, *right}) if left.get(key) != right.get(key)), "the manifest")
    return Difference(0, f"{key} in the image's configuration", str(left.get(key)), str(right.get(key)))


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
