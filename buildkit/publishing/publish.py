"""Publishes an image from the matrix to its public tags; only the last step makes it public.

Build, test, fix the times in the image, push it by digest and under a staging tag, read every byte back, pull and test
again, attach the bills of materials and the provenance, sign, verify, and then promote: set the public tags. An error
before that leaves no public tag. A second run keeps what is there already and continues.
"""

import logging
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from buildkit.errors import LockError, PublishError
from buildkit.images.archive import CONFIG, ESTARGZ, ImageArchive, estargz_archive, fixed_archive
from buildkit.images.build import BuildOptions, BuildResult, build_image, cache_folder, prepared
from buildkit.images.test import require_pytest, run_container_tests
from buildkit.publishing.check import PublishedImage
from buildkit.publishing.provenance import BuildRecord
from buildkit.publishing.release import Publication, SignedImage, Tags, choose_tags, promote, read_staged, sign_staged
from buildkit.recipe.lock_file import lock_name, lock_path, read_lock
from buildkit.recipe.matrix import Matrix, Variant
from buildkit.recipe.project import INSTALLED, UNCOMMITTED, is_committed, project_version, source_revision, uncommitted
from buildkit.registry.client import Registry
from buildkit.registry.compression import COMPRESSIONS
from buildkit.registry.content import IMAGE
from buildkit.registry.credentials import read_credentials
from buildkit.registry.reference import Reference
from buildkit.registry.signature import Signer, public_key
from buildkit.running.engine import Docker

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReleaseRequest:
    """What to publish and where. `pytest_arguments` select smoke tests; `base` is a provider or `auto`; `compression`
    is `estargz` or names one of `COMPRESSIONS`."""

    matrix: Matrix
    variant: Variant
    repository: Reference
    signer: Signer
    ca: Path | None = None
    base: str = "auto"
    compression: str = "zstd"
    pytest_arguments: tuple[str, ...] = ()


def tags_for(request: ReleaseRequest, digest: str) -> Tags:
    """The tags of an image with this digest (`sha256:…`). An extended one never gets its target's name alone."""
    matrix, variant = request.matrix, request.variant
    default = variant.extension is None and matrix.targets[variant.target].default.name == variant.name
    lock, name = read_lock(matrix, variant).digest, variant.identifier.removeprefix(f"{variant.target}-")
    return choose_tags(variant.target, name, default, project_version(matrix.root), lock, digest)


def connect(request: ReleaseRequest) -> Registry:
    return Registry(request.repository, read_credentials(request.repository.host), request.ca)


def check_access(request: ReleaseRequest) -> None:
    """Raises for a wrong password or an unusable key, before an hour of building."""
    connect(request).check_access()
    if request.signer.key:
        public_key(request.signer)


def publish_images(requests: list[ReleaseRequest], engine: Docker) -> list[Publication]:
    """Builds, tests, pushes and signs each image, and then promotes all of them: they are one release of one commit.

    Raises a `BuildkitError` before anything is promoted, and for what is not committed before anything is built.
    """
    require_pytest()
    revisions = []
    for request in requests:
        read_lock(request.matrix, request.variant)
        refuse_own_lock(request.matrix, request.variant)
        revisions.append(committed_revision(request.matrix.root))
        if request.compression == ESTARGZ:
            engine.check_oci_output()
    signed = [sign_image(request, engine, revision) for request, revision in zip(requests, revisions, strict=True)]
    return [promote(connect(request), image) for request, image in zip(requests, signed, strict=True)]


def sign_image(request: ReleaseRequest, engine: Docker, revision: str) -> SignedImage:
    """Builds, tests, pushes and signs the image of this commit; it has only its staging tag."""
    started, clock = now(), time.monotonic()
    registry = connect(request)
    matrix, variant = request.matrix, request.variant
    lock = read_lock(matrix, variant)
    built = build_locked(request, engine)
    if source_revision(matrix.root) != revision:
        raise PublishError(
            f"{matrix.root} changed while the image was built", "publish from a checkout that nothing else changes"
        )
    test_image(request, built.image_id)
    log.info("publish: setting all times to the lock's date")
    with archive_of(built, request, engine, lock.epoch) as archive:
        tags = tags_for(request, archive.digest)
        push_staged(registry, archive, tags)
    log.info("publish: reading %s back", request.repository.tagged(tags.staging))
    image = read_staged(registry, tags)
    refuse_other_image(image, archive)
    pull_back(engine.binary, request.repository.at(image.digest), lambda name: test_image(request, name))
    record = BuildRecord(
        target=variant.target,
        variant=variant.name,
        version=project_version(matrix.root),
        revision=revision,
        lock=f"sha256:{lock.digest}",
        lock_path=lock_name(matrix, variant),
        base=variant.base.image,
        base_provider=built.base_provider,
        base_digest=lock.base_digest,
        extension=image.labels.get("dev.slipway.extension", ""),
        source_date=lock.epoch,
        started=started,
        finished=now(),
    )
    signed = sign_staged(registry, image, tags, record, lock, request.signer, request.ca)
    return replace(signed, seconds=round(time.monotonic() - clock, 1))


def committed_revision(root: Path) -> str:
    """The commit of the checkout, which is its only source. Empty for an installed package without one.

    Raises `PublishError` for uncommitted changes, and where git cannot read the commit.
    """
    revision = source_revision(root)
    if (root / ".git").exists() and not revision:
        raise PublishError(f"git cannot read the commit of {root}", f"`git -C {root} status` says why")
    if not revision.endswith(UNCOMMITTED):
        return revision
    names = ["the installed package"] if root == INSTALLED else uncommitted(root)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    raise PublishError(
        f"{', '.join(names[:3])}{more} is not as in the commit "
        f"{revision.removesuffix(UNCOMMITTED)[:12]}, and nobody else could build this image again",
        "commit the changes, or publish from a clean checkout",
    )


def refuse_own_lock(matrix: Matrix, variant: Variant) -> None:
    """Raises `PublishError` for a lock that only this host has: nobody else could build the image again."""
    path = lock_path(matrix, variant)
    if not (path.is_relative_to(matrix.root) and is_committed(matrix.root, path)):
        raise PublishError(
            f"{lock_name(matrix, variant)} is not committed, so nobody else could build this image again",
            "commit the lock, then publish again",
        )


def build_locked(request: ReleaseRequest, engine: Docker) -> BuildResult:
    """The image of exactly the locks. Raises `PublishError` when a locked package cannot be had any more."""
    try:
        return build_image(request.matrix, request.variant, engine, BuildOptions(request.base, only_locked=True))
    except LockError as error:
        raise PublishError(
            f"the image would not be the one of its lock: {error}",
            f"{error.hint}; commit the lock, then publish again",
        ) from error


@contextmanager
def archive_of(built: BuildResult, request: ReleaseRequest, engine: Docker, epoch: int) -> Iterator[ImageArchive]:
    """The built image with all times set to `epoch`. BuildKit writes eStargz layers from its cache of the build."""
    if request.compression != ESTARGZ:
        compression = COMPRESSIONS[request.compression]
        with fixed_archive(engine, built.image_id, epoch, cache_folder(), compression) as archive:
            yield archive
        return
    matrix, variant = request.matrix, request.variant
    lock = read_lock(matrix, variant)
    with (
        prepared(matrix, variant, engine, lock, BuildOptions(built.base_provider, only_locked=True)) as build,
        estargz_archive(engine, build.request, cache_folder()) as archive,
    ):
        yield archive


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def test_image(request: ReleaseRequest, image: str) -> None:
    root, target = request.matrix.root, request.variant.target
    status = run_container_tests(root, target, image, ("smoke",), request.pytest_arguments, output=2)
    if status != 0:
        raise PublishError(
            f"the smoke tests of {image} ended with status {status}", "see pytest's report above; nothing was promoted"
        )


def push_staged(registry: Registry, archive: ImageArchive, tags: Tags) -> None:
    """Pushes what the registry lacks, the manifest last."""
    for layer in archive.layers:
        log.info("publish: layer %s, %.1f MB", layer.blob.digest[:19], layer.blob.size / 1e6)
        registry.put_file(layer.path, layer.blob)
    registry.put_blob(archive.config, CONFIG)
    registry.put_manifest(archive.digest, archive.manifest, IMAGE)
    registry.put_manifest(tags.staging, archive.manifest, IMAGE)


def refuse_other_image(image: PublishedImage, archive: ImageArchive) -> None:
    """Raises `PublishError` if another publisher overwrote the staging tag."""
    if (image.digest, image.manifest.config.digest) != (archive.digest, archive.image_id):
        raise PublishError(
            f"the staging tag names another image, {image.digest}, than the one that was built, {archive.digest}",
            "nothing was signed; find out who else pushes to this repository",
        )


# ---- the engine ------------------------------------------------------------------------------------------------------


def pull_back(binary: str, reference: Reference, test: Callable[[str], None]) -> None:
    """Pulls the digest from the registry and tests the pulled image."""
    run_engine(
        [binary, "pull", str(reference)],
        f"pull {reference} back",
        "the engine's own error is above; run the same command again",
    )
    try:
        test(str(reference))
    finally:
        subprocess.run([binary, "rmi", "--no-prune", str(reference)], capture_output=True, check=False)


def run_engine(command: list[str], purpose: str, hint: str) -> None:
    if (status := subprocess.run(command, stdout=2, check=False).returncode) != 0:
        raise PublishError(f"the engine could not {purpose}: status {status}", hint)
