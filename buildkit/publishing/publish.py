"""Publishes an image from the matrix to its public tags; only the last step makes it public.

Build, test, push under a staging tag, read every byte back, pull and test again, attach the bills of materials and the
provenance, sign, verify, and then promote: set the public tags. An error before that leaves no public tag. A second run
keeps what is there already and continues.
"""

import logging
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from buildkit.errors import PublishError
from buildkit.images.build import build_image
from buildkit.images.test import run_container_tests
from buildkit.publishing.check import PublishedImage
from buildkit.publishing.provenance import BuildRecord
from buildkit.publishing.release import Publication, Tags, choose_tags, read_staged, release
from buildkit.publishing.signature import Signer, public_key
from buildkit.recipe.lock_file import lock_name, read_lock
from buildkit.recipe.matrix import Matrix, Variant
from buildkit.recipe.project import project_version, source_changed, source_revision
from buildkit.registry.client import PATIENCE, Registry
from buildkit.registry.credentials import read_credentials
from buildkit.registry.reference import Reference
from buildkit.running.engine import ContainerEngine

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReleaseRequest:
    """What to publish and where. `pytest_arguments` select smoke tests; `base` is a provider or `auto`."""

    matrix: Matrix
    variant: Variant
    repository: Reference
    signer: Signer
    ca: Path | None = None
    base: str = "auto"
    pytest_arguments: tuple[str, ...] = ()


def tags_for(request: ReleaseRequest, image_id: str) -> Tags:
    """The tags of an image with this id (`sha256:…`)."""
    matrix, variant = request.matrix, request.variant
    default = matrix.targets[variant.target].default.name == variant.name
    lock = read_lock(matrix, variant).digest
    return choose_tags(variant.target, variant.name, default, project_version(matrix.root), lock, image_id)


def connect(request: ReleaseRequest, patience: float = PATIENCE) -> Registry:
    return Registry(request.repository, read_credentials(request.repository.host), request.ca, patience)


def check_access(request: ReleaseRequest) -> None:
    """Raises for a wrong password or an unusable key, before an hour of building."""
    connect(request).check_access()
    if request.signer.key:
        public_key(request.signer)


def publish_image(request: ReleaseRequest, engine: ContainerEngine) -> Publication:
    """Builds, tests, pushes, signs and promotes the image. Raises a `BuildkitError` before anything is promoted."""
    started, clock = now(), time.monotonic()
    registry = connect(request)
    matrix, variant = request.matrix, request.variant
    lock = read_lock(matrix, variant)
    built = build_image(matrix, variant, engine, request.base)
    test_image(request, built.image_id)
    tags = tags_for(request, built.image_id)
    with registry_errors_first(request):
        push_staged(engine.binary, built.image_id, request.repository.tagged(tags.staging))
    log.info("publish: reading %s back", request.repository.tagged(tags.staging))
    image = read_staged(registry, tags)
    refuse_other_image(image, built.image_id)
    pull_back(engine.binary, request.repository.at(image.digest), lambda name: test_image(request, name))
    record = BuildRecord(
        target=variant.target,
        variant=variant.name,
        version=project_version(matrix.root),
        revision=source_revision(matrix.root),
        changed=source_changed(matrix.root),
        lock=f"sha256:{lock.digest}",
        lock_path=lock_name(matrix, variant),
        base=variant.base.image,
        base_provider=built.base_provider,
        base_digest=lock.base_digest,
        source_date=lock.epoch,
        started=started,
        finished=now(),
    )
    publication = release(registry, image, tags, record, lock, request.signer, request.ca)
    return replace(publication, seconds=round(time.monotonic() - clock, 1))


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def test_image(request: ReleaseRequest, image: str) -> None:
    root, target = request.matrix.root, request.variant.target
    status = run_container_tests(root, target, image, ("smoke",), request.pytest_arguments, output=2)
    if status != 0:
        raise PublishError(
            f"the smoke tests of {image} ended with status {status}", "see pytest's report above; nothing was promoted"
        )


def refuse_other_image(image: PublishedImage, built: str) -> None:
    """Raises `PublishError` if another publisher overwrote the staging tag.

    `built` is the engine's id: the digest of the image's configuration or, in containerd's store, of its manifest.
    """
    if built not in (image.manifest.config.digest, image.digest):
        raise PublishError(
            f"the staging tag names another image, {image.digest}, than the one that was built and tested, {built}",
            "nothing was signed; find out who else pushes to this repository",
        )


# ---- the engine ------------------------------------------------------------------------------------------------------


def push_staged(binary: str, image: str, staged: Reference) -> None:
    """Pushes a local image with the engine's own client, which skips the layers that the registry has."""
    run_engine(
        [binary, "tag", image, str(staged)], "tag the image for staging", "run `buildkit build` if the image is gone"
    )
    try:
        run_engine(
            [binary, "push", str(staged)],
            f"push to {staged.host}",
            "the engine's own error is above; no tag was promoted, and a second run sends only what is missing",
        )
    finally:
        subprocess.run([binary, "rmi", "--no-prune", str(staged)], capture_output=True, check=False)


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


@contextmanager
def registry_errors_first(request: ReleaseRequest) -> Iterator[None]:
    """Asks the registry when the engine fails: its own error (unreachable, full, refused) is more precise."""
    try:
        yield
    except PublishError:
        connect(request, patience=2).check_access()
        raise
