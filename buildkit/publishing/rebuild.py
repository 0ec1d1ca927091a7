"""Rebuilds a published image from its own labels: target, variant, base, lock and commit."""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from buildkit.errors import TrustError, UsageError
from buildkit.images.archive import ESTARGZ_ANNOTATION
from buildkit.images.reproduce import rebuild
from buildkit.publishing.check import ImageCheck, find_image, run_check
from buildkit.recipe.lock_file import read_lock
from buildkit.recipe.matrix import load_matrix
from buildkit.registry.client import Registry
from buildkit.registry.content import Manifest
from buildkit.running.engine import Docker

COMMIT = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")


@dataclass(frozen=True)
class RegistryContent:
    """A published image whose layers are read when they are needed."""

    registry: Registry
    manifest: Manifest

    @property
    def config(self) -> bytes:
        return self.registry.blob(self.manifest.config)

    def layer_file(self, number: int) -> BinaryIO:
        return self.registry.open_blob(self.manifest.layers[number - 1]).as_file()


def check_rebuild(registry: Registry, digest: str, root: Path, engine: Docker) -> ImageCheck:
    """Whether a build of the image's own commit, here and without cache, has the same files and configuration.

    `root` is a checkout whose repository has that commit. Raises a `BuildkitError` when it cannot be built.
    """
    return run_check("rebuild", lambda: compare(registry, digest, root, engine))


def compare(registry: Registry, digest: str, root: Path, engine: Docker) -> str:
    image = find_image(registry, digest)
    label = {name: image.labels.get(f"dev.slipway.{name}", "") for name in ("target", "variant", "lock")}
    if "dev.slipway.extension" in image.labels:
        raise TrustError("its user's additions are in no commit", "build it from the slipway.toml of its maker")
    revision = image.labels.get("org.opencontainers.image.revision", "")
    with checkout(root, revision) as folder:
        matrix = load_matrix(folder)
        variant = matrix.variant(label["target"], label["variant"])
        if label["lock"] != (lock := f"sha256:{read_lock(matrix, variant).digest}"):
            raise TrustError(f"the commit {revision[:12]} has another lock, {lock[:19]}", "do not use this image")
        base = image.labels.get("dev.slipway.base.provider", "auto")
        estargz = any(ESTARGZ_ANNOTATION in layer.annotations for layer in image.manifest.layers)
        published = RegistryContent(registry, image.manifest)
        difference = rebuild(matrix, variant, engine, base, published, estargz)
    if difference:
        raise TrustError(
            f"a build of {revision[:12]} differs first in {difference.file} of layer {difference.layer} "
            f"(published: {difference.first}; built here: {difference.second})",
            "do not use this image",
        )
    return f"a build of {revision[:12]} without cache has the same files and configuration"


@contextmanager
def checkout(root: Path, revision: str) -> Iterator[Path]:
    """A folder with a commit of the project's repository. Raises `UsageError` if the repository does not have it."""
    if not COMMIT.fullmatch(revision):
        raise UsageError("the image names no commit", "it was not built from a git checkout, and cannot be built again")
    with tempfile.TemporaryDirectory(prefix="slipway-commit-") as parent:
        folder = Path(parent, "source")
        git = ["git", "-C", str(root), "worktree"]
        added = subprocess.run(
            [*git, "add", "--detach", str(folder), revision], capture_output=True, text=True, check=False
        )
        if added.returncode != 0:
            raise UsageError(
                f"{root} has no commit {revision}: {added.stderr.strip()}",
                f"run this in a clone of the source, after `git fetch origin {revision}`",
            )
        try:
            yield folder
        finally:
            subprocess.run([*git, "remove", "--force", str(folder)], capture_output=True, check=False)
