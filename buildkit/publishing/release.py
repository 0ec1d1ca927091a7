"""Turns staged images into published ones: attaches, signs, verifies, and only then promotes. Needs no engine."""

import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path

from buildkit.errors import PublishError, RegistryError, TrustError
from buildkit.publishing import dsse, provenance, sbom
from buildkit.publishing.check import (
    ATTACHMENTS,
    TAGS,
    PublishedImage,
    check_provenance,
    check_published,
    check_sbom,
    fetch_attachment,
    find_image,
    read_layers,
)
from buildkit.publishing.provenance import BuildRecord
from buildkit.recipe.lock import Lock
from buildkit.registry.client import Registry
from buildkit.registry.reference import Reference
from buildkit.registry.signature import Signer, Trust, public_key, sign, signed_annotations

log = logging.getLogger(__name__)

SHORT = 12  # characters of a digest in a tag


@dataclass(frozen=True)
class Tags:
    """`staging` is not for users. `immutable` names lock and content and never moves; `version` and `moving` do."""

    staging: str
    immutable: str
    version: str
    moving: tuple[str, ...]

    @property
    def promoted(self) -> tuple[str, ...]:
        """In the order in which they are set: when a moving tag moves, the others are there."""
        return (self.immutable, self.version, *self.moving)


@dataclass(frozen=True)
class Publication:
    """A published image. `attachments` maps a kind to the digest of its manifest; `seconds` is the whole run."""

    repository: str
    digest: str
    tags: tuple[str, ...]
    attachments: dict[str, str]
    signed: str
    seconds: float = 0.0


@dataclass(frozen=True)
class SignedImage:
    """A staged image that was signed and verified, and only lacks its public tags."""

    image: PublishedImage
    tags: Tags
    attachments: dict[str, str]
    signed: str
    seconds: float = 0.0


def choose_tags(target: str, variant: str, default: bool, version: str, lock: str, image: str) -> Tags:
    """The tags of an image. `lock` and `image` are digests (`sha256:…`); `default` marks its target's first variant."""
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


def read_staged(registry: Registry, tags: Tags) -> PublishedImage:
    """The staged image, every byte of it read back from the registry."""
    return read_layers(registry, find_image(registry, tags.staging))


def sign_staged(
    registry: Registry,
    image: PublishedImage,
    tags: Tags,
    record: BuildRecord,
    lock: Lock,
    signer: Signer,
    ca: Path | None,
) -> SignedImage:
    """Attaches, signs and verifies a staged image, and promotes nothing.

    `image` comes from `read_staged`; `lock` is the lock that it was built from.
    """
    refuse_conflict(registry, image, tags)
    reference = registry.reference.at(image.digest)
    with tempfile.TemporaryDirectory(prefix="slipway-trust-") as folder:
        trust = trust_of(signer, Path(folder))
        signed = signed_before(reference, signer, trust, ca)
        attachments = attach_bills(registry, image, lock)
        attachments["provenance"] = earlier_provenance(registry, image, signed, trust) or attach_provenance(
            registry, image, record, signer, trust
        )
        annotations = {ATTACHMENTS[kind][1]: digest for kind, digest in attachments.items()}
        annotations[TAGS] = " ".join(tags.promoted)
        if any(annotations.items() <= signature.items() for signature in signed):
            log.info("publish: already signed")
        else:
            sign(reference, signer, annotations, ca)
            log.info("publish: signed")
        report = check_published(registry, image.digest, trust, ca, quick=True)
    if failed := [f"{check.name}: {check.detail}" for check in report.checks if not check.passed]:
        raise PublishError(
            f"the pushed image fails verification: {'; '.join(failed)}",
            "no tag was promoted; run this again, and if it fails again, find out who else writes to this repository",
        )
    return SignedImage(image, tags, attachments, "key" if signer.key else "keyless")


def refuse_conflict(registry: Registry, image: PublishedImage, tags: Tags) -> None:
    present = registry.manifest(tags.immutable)
    if present is not None and present.descriptor.digest != image.digest:
        raise PublishError(
            f"{registry.reference.tagged(tags.immutable)} exists with other content, {present.descriptor.digest}",
            "an immutable tag never moves: find out who pushed it, and remove it by hand if it is wrong",
        )


def attach_bills(registry: Registry, image: PublishedImage, lock: Lock) -> dict[str, str]:
    """The digests of the attached bills of materials by kind."""
    if image.inventory is None:
        raise PublishError("the layers of the staged image were not read", "get the image from `read_staged`")
    bill = sbom.describe_image(image.inventory, image.labels, lock, image.digest)
    documents = {"cyclonedx": sbom.encode(sbom.cyclonedx(bill)), "spdx": sbom.encode(sbom.spdx(bill))}
    attached = {}
    for kind, content in documents.items():
        check_sbom(image, content)
        attached[kind] = registry.attach(
            image.manifest.descriptor, ATTACHMENTS[kind][0], content, {"org.opencontainers.image.created": bill.created}
        ).digest
        log.info("publish: attached %s, %d bytes", kind, len(content))
    return attached


def attach_provenance(
    registry: Registry, image: PublishedImage, record: BuildRecord, signer: Signer, trust: Trust
) -> str:
    """The digest of the attached provenance: in an envelope by key, a bare statement by a keyless signer.

    An envelope has no place for what a keyless signature needs: a certificate and an entry of Sigstore's log.
    """
    document = provenance.statement(registry.reference.name, image.digest, record, provenance.read_builder())
    kind, content = provenance.MEDIA_TYPE, provenance.encode(document)
    if signer.key:
        kind, content = dsse.MEDIA_TYPE, dsse.seal(document, signer)
    check_provenance(image, content, trust)
    annotations = {
        "org.opencontainers.image.created": record.finished,
        "in-toto.io/predicate-type": provenance.PREDICATE,
    }
    log.info("publish: attached provenance")
    return registry.attach(image.manifest.descriptor, kind, content, annotations).digest


def earlier_provenance(registry: Registry, image: PublishedImage, signed: list[dict[str, str]], trust: Trust) -> str:
    """The digest of the provenance that an earlier run signed, or empty. Its times are that run's."""
    trusted = {signature.get(ATTACHMENTS["provenance"][1]) for signature in signed}
    for entry in registry.referrers(image.digest):
        if entry.digest in trusted:
            try:
                check_provenance(image, fetch_attachment(registry, image, entry), trust)
            except TrustError as error:
                log.warning("publish: ignoring the attached provenance %s: %s", entry.digest, error)
            else:
                return entry.digest
    return ""


def trust_of(signer: Signer, folder: Path) -> Trust:
    """Accepts our own signature. Keyless, it accepts any identity in Sigstore's log, because ours is not known here."""
    if not signer.key:
        return Trust(identity=".*", issuer=".*", pattern=True)
    path = folder / "cosign.pub"
    path.write_text(public_key(signer))
    return Trust(key=str(path))


def signed_before(reference: Reference, signer: Signer, trust: Trust, ca: Path | None) -> list[dict[str, str]]:
    """The annotations of our own earlier signatures; none for a keyless signer, whose identity is not known here."""
    if not signer.key:
        return []
    try:
        return signed_annotations(reference, trust, ca)
    except TrustError:
        return []


def promote(registry: Registry, signed: SignedImage) -> Publication:
    """Sets the public tags. Each takes one request: a tag points at the whole image or stays as it was."""
    image, tags = signed.image, signed.tags
    for tag in tags.promoted:
        registry.put_manifest(tag, image.manifest.body, image.manifest.descriptor.media_type)
        log.info("publish: %s", registry.reference.tagged(tag))
    for tag in tags.promoted:
        manifest = registry.manifest(tag)
        if manifest is None or manifest.descriptor.digest != image.digest:
            raise RegistryError(
                f"{registry.reference.tagged(tag)} does not name the image that was just pushed",
                "run the same command again; another publisher may have set the tag meanwhile",
            )
    return Publication(
        registry.reference.name, image.digest, tags.promoted, signed.attachments, signed.signed, signed.seconds
    )
