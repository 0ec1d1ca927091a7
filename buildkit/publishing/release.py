"""Publishes an image in steps of which only the last makes it public.

Build, test, push under a staging tag, read every byte back, pull and test again, attach the bills of materials and the
provenance, sign, check all of it from outside; then promote: the immutable tag, the version tag, the moving tags.
Whatever stops it before leaves no promoted tag, and running it again finishes: no step is done twice.
"""

import logging
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from buildkit.errors import PublishError, RegistryError, TrustError
from buildkit.images.build import build_image
from buildkit.images.test import run_container_tests
from buildkit.publishing import provenance, sbom
from buildkit.publishing.check import (
    ATTACHMENTS,
    Image,
    check_provenance,
    check_published,
    check_sbom,
    fetch_attachment,
    find_image,
    read_layers,
)
from buildkit.publishing.signature import Signer, Trust, public_key, sign, signed_annotations
from buildkit.recipe.dockerfile import git, project_version
from buildkit.recipe.lock import Lock
from buildkit.recipe.lock_file import lock_path, read_lock
from buildkit.recipe.matrix import Matrix, Variant
from buildkit.registry.client import PATIENCE, Registry
from buildkit.registry.credentials import read_credentials
from buildkit.registry.reference import Reference
from buildkit.running.engine import Engine

log = logging.getLogger(__name__)

SHORT = 12  # characters of a digest in a tag


@dataclass(frozen=True)
class Tags:
    """`staging` is nobody's to use. `immutable` names lock and content; it never moves, `version` and `moving` do."""

    staging: str
    immutable: str
    version: str
    moving: tuple[str, ...]

    @property
    def promoted(self) -> tuple[str, ...]:
        """In the order in which they are set: who follows a moving tag finds everything else there already."""
        return (self.immutable, self.version, *self.moving)


@dataclass(frozen=True)
class Publication:
    """What was published. `attachments` maps a kind to the digest of its manifest; `seconds` is the whole run."""

    repository: str
    digest: str
    tags: tuple[str, ...]
    attachments: dict[str, str]
    signed: str
    seconds: float = 0.0


def choose_tags(target: str, variant: str, default: bool, version: str, lock: str, image: str) -> Tags:
    """`lock` and `image` are digests (`sha256:…`); `default` says whether the variant is its target's first."""
    name = f"{target}-{variant}"
    content = f"{name}-{short(lock)}-{short(image)}"
    return Tags(
        staging=f"staging-{content}",
        immutable=content,
        version=f"{name}-{version}",
        moving=(name, target) if default else (name,),
    )


def short(digest: str) -> str:
    return digest.removeprefix("sha256:")[:SHORT]


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# ---- what needs the engine -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """What to publish and where. `pytest_arguments` choose among the smoke tests; `base` is a provider or `auto`."""

    matrix: Matrix
    variant: Variant
    repository: Reference
    signer: Signer
    ca: Path | None = None
    base: str = "auto"
    pytest_arguments: tuple[str, ...] = ()


def tags_for(request: Request, image_id: str) -> Tags:
    matrix, variant = request.matrix, request.variant
    default = matrix.targets[variant.target].default.name == variant.name
    lock = read_lock(matrix, variant).digest
    return choose_tags(variant.target, variant.name, default, project_version(matrix.root), lock, image_id)


def connect(request: Request, patience: float = PATIENCE) -> Registry:
    return Registry(request.repository, read_credentials(request.repository.host), request.ca, patience)


@contextmanager
def registry_speaks_first(request: Request) -> Iterator[None]:
    """When the engine fails, the registry's own reason (it is gone, full, refuses) says more than the engine's."""
    try:
        yield
    except PublishError:
        connect(request, patience=2).check_access()
        raise


def check_access(request: Request) -> None:
    """Finds a wrong password, or a key that cannot be used, before an hour of building."""
    connect(request).check_access()
    if request.signer.key:
        public_key(request.signer)


def publish_image(request: Request, engine: Engine) -> Publication:
    """The whole way from the matrix to promoted tags. Raises a `BuildkitError` before anything is promoted."""
    started, clock = now(), time.monotonic()
    registry = connect(request)
    matrix, variant = request.matrix, request.variant
    lock = read_lock(matrix, variant)
    built = build_image(matrix, variant, engine, request.base)
    test_image(request, built.image_id)
    tags = tags_for(request, built.image_id)
    with registry_speaks_first(request):
        push_staged(engine.binary, built.image_id, request.repository.tagged(tags.staging))
    log.info("publish: reading %s back", request.repository.tagged(tags.staging))
    image = read_staged(registry, tags)
    refuse_other(image, lock)
    pull_back(engine.binary, request.repository.at(image.digest), lambda name: test_image(request, name))
    origin = provenance.Origin(
        target=variant.target,
        variant=variant.name,
        version=project_version(matrix.root),
        revision=git(matrix.root, "rev-parse", "HEAD"),
        changed=bool(git(matrix.root, "status", "--porcelain")),
        lock=f"sha256:{lock.digest}",
        lock_path=str(lock_path(matrix, variant).relative_to(matrix.root)),
        base=variant.base.image,
        base_provider=built.base_provider,
        base_digest=lock.base_digest,
        source_date=lock.epoch,
        started=started,
        finished=now(),
    )
    publication = release(registry, image, tags, origin, lock, request.signer, request.ca)
    return replace(publication, seconds=round(time.monotonic() - clock, 1))


def test_image(request: Request, image: str) -> None:
    root, target = request.matrix.root, request.variant.target
    status = run_container_tests(root, target, image, ("smoke",), request.pytest_arguments, output=2)
    if status != 0:
        raise PublishError(
            f"the smoke tests of {image} ended with status {status}", "see pytest's report above; nothing was promoted"
        )


def refuse_other(image: Image, lock: Lock) -> None:
    """The staging tag names the content, so that only somebody who means to can put another image there."""
    found = image.labels.get("dev.slipway.lock")
    if found != f"sha256:{lock.digest}":
        raise PublishError(f"the staged image was built from another lock, {found}", "look who else pushes here")


def push_staged(binary: str, image: str, staged: Reference) -> None:
    """Pushes a local image with the engine's own client. Layers that the registry has are not sent again."""
    run_engine(
        [binary, "tag", image, str(staged)],
        "give the image its staging tag",
        "is the image there? `buildkit build` makes it",
    )
    try:
        run_engine(
            [binary, "push", str(staged)],
            f"push to {staged.host}",
            "see the engine's words above; no tag was promoted, and running this again sends only what is missing",
        )
    finally:
        subprocess.run([binary, "rmi", "--no-prune", str(staged)], capture_output=True, check=False)


def pull_back(binary: str, reference: Reference, test: Callable[[str], None]) -> None:
    """Pulls the digest from the registry and tests that."""
    run_engine(
        [binary, "pull", str(reference)], f"pull {reference} back", "see the engine's words above, then run this again"
    )
    try:
        test(str(reference))
    finally:
        subprocess.run([binary, "rmi", "--no-prune", str(reference)], capture_output=True, check=False)


def run_engine(command: list[str], purpose: str, hint: str) -> None:
    if (status := subprocess.run(command, stdout=2, check=False).returncode) != 0:
        raise PublishError(f"the engine could not {purpose}: status {status}", hint)


# ---- what needs only the registry ------------------------------------------------------------------------------------


def read_staged(registry: Registry, tags: Tags) -> Image:
    """The staged image, every byte of it read back from the registry."""
    return read_layers(registry, find_image(registry, tags.staging))


def release(
    registry: Registry, image: Image, tags: Tags, origin: provenance.Origin, lock: Lock, signer: Signer, ca: Path | None
) -> Publication:
    """Attaches, signs, checks and promotes a staged image. Raises a `BuildkitError` before anything is promoted.

    `lock` is the one that the image was built from, `image` has been read with its layers.
    """
    refuse_conflict(registry, image, tags)
    attachments = attach_documents(registry, image, origin, lock)
    reference = registry.reference.at(image.digest)
    with tempfile.TemporaryDirectory(prefix="slipway-trust-") as folder:
        trust = trust_of(signer, Path(folder))
        annotations = {ATTACHMENTS[kind][1]: digest for kind, digest in attachments.items()}
        if signed_already(reference, trust, annotations, ca):
            log.info("publish: signed before")
        else:
            sign(reference, signer, annotations, ca)
            log.info("publish: signed")
        report = check_published(registry, image.digest, trust, ca, quick=True)
    if failed := [f"{check.name}: {check.detail}" for check in report.checks if not check.passed]:
        raise PublishError(
            f"what was pushed does not pass its own check: {'; '.join(failed)}",
            "no tag was promoted; run this again, and if it stays so, look who else writes to this repository",
        )
    promote(registry, image, tags)
    return Publication(
        registry.reference.name, image.digest, tags.promoted, attachments, "key" if signer.key else "keyless"
    )


def refuse_conflict(registry: Registry, image: Image, tags: Tags) -> None:
    present = registry.manifest(tags.immutable)
    if present is not None and present.descriptor.digest != image.digest:
        raise PublishError(
            f"{registry.reference.tagged(tags.immutable)} exists with other content, {present.descriptor.digest}",
            "an immutable tag is never moved: find out who pushed it, and remove it by hand if it is wrong",
        )


def attach_documents(registry: Registry, image: Image, origin: provenance.Origin, lock: Lock) -> dict[str, str]:
    """The digests of the attachments by kind, those kept that were attached before and still hold."""
    if image.inventory is None:
        raise PublishError("the layers of the staged image were not read", "read them before describing the image")
    bill = sbom.describe_image(image.inventory, image.labels, lock, image.digest)
    documents = {"cyclonedx": sbom.encode(sbom.cyclonedx(bill)), "spdx": sbom.encode(sbom.spdx(bill))}
    attached = {}
    for kind, content in documents.items():
        check_sbom(image, content)
        attached[kind] = registry.attach(
            image.manifest.descriptor, ATTACHMENTS[kind][0], content, {"org.opencontainers.image.created": bill.created}
        ).digest
        log.info("publish: attached %s, %d bytes", kind, len(content))
    attached["provenance"] = earlier_provenance(registry, image) or attach_provenance(registry, image, origin)
    return attached


def attach_provenance(registry: Registry, image: Image, origin: provenance.Origin) -> str:
    document = provenance.statement(registry.reference.name, image.digest, origin, provenance.read_builder())
    content = provenance.encode(document)
    check_provenance(image, content)
    annotations = {
        "org.opencontainers.image.created": origin.finished,
        "in-toto.io/predicate-type": provenance.PREDICATE,
    }
    log.info("publish: attached provenance")
    return registry.attach(image.manifest.descriptor, provenance.MEDIA_TYPE, content, annotations).digest


def earlier_provenance(registry: Registry, image: Image) -> str:
    """The digest of a provenance that an interrupted run has attached, or empty. Its times are those of that run."""
    for entry in registry.referrers(image.digest):
        if entry.artifact_type == provenance.MEDIA_TYPE:
            try:
                check_provenance(image, fetch_attachment(registry, image, entry))
            except TrustError as error:
                log.warning("publish: leaving %s aside: %s", entry.digest, error)
            else:
                return entry.digest
    return ""


def trust_of(signer: Signer, folder: Path) -> Trust:
    """Whom to trust so that our own signature counts. Keyless, any identity in Sigstore's log: we do not know ours."""
    if not signer.key:
        return Trust(identity=".*", issuer=".*", pattern=True)
    path = folder / "cosign.pub"
    path.write_text(public_key(signer))
    return Trust(key=str(path))


def signed_already(reference: Reference, trust: Trust, annotations: dict[str, str], ca: Path | None) -> bool:
    try:
        signatures = signed_annotations(reference, trust, ca)
    except TrustError:
        return False
    return any(annotations.items() <= signature.items() for signature in signatures)


def promote(registry: Registry, image: Image, tags: Tags) -> None:
    """Sets the public tags. Each is one request, and a tag points at the whole image or stays as it was."""
    for tag in tags.promoted:
        registry.put_manifest(tag, image.manifest.body, image.manifest.descriptor.media_type)
        log.info("publish: %s", registry.reference.tagged(tag))
    for tag in tags.promoted:
        found = registry.manifest(tag)
        if found is None or found.descriptor.digest != image.digest:
            raise RegistryError(f"{registry.reference.tagged(tag)} is not what was just pushed", "run this again")
