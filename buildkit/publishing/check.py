"""Verifies a published image with the registry and cosign alone: no engine, no checkout.

The manifest and every blob must have their digests, the signature must cover the image and its attachments and give it
the tag, both bills of materials must list exactly the packages in the layers, and labels, documents and provenance must
name the same lock.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from buildkit.errors import BuildkitError, RegistryError, SignatureError, TrustError, UnreachableError
from buildkit.publishing import dsse, provenance, sbom
from buildkit.publishing.inventory import Inventory, apply_layer, read_inventory
from buildkit.recipe.dockerfile import CHANGES
from buildkit.recipe.project import UNCOMMITTED
from buildkit.registry.client import Registry
from buildkit.registry.content import INDEX, Descriptor, Manifest, read_config
from buildkit.registry.signature import Trust, signed_annotations

# Kind of attachment: its media type, and the annotation that carries its signed digest. A keyless publisher attaches a
# bare statement as provenance, with a type of its own.
ATTACHMENTS = {
    "cyclonedx": (sbom.MEDIA_TYPES["cyclonedx"], "dev.slipway.sbom.cyclonedx"),
    "spdx": (sbom.MEDIA_TYPES["spdx"], "dev.slipway.sbom.spdx"),
    "provenance": (dsse.MEDIA_TYPE, "dev.slipway.provenance"),
}
TAGS = "dev.slipway.tags"  # the signature's annotation with the image's public tags, separated by spaces
LABELS = ("target", "variant", "lock", "extension")  # `dev.slipway.…`; /etc/slipway/image.json has the same values


@dataclass(frozen=True)
class ImageCheck:
    """The result of one check. `detail` is the finding, or the reason for the failure."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class VerificationReport:
    reference: str
    digest: str
    checks: tuple[ImageCheck, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)


@dataclass(frozen=True)
class PublishedImage:
    """The manifest of an image in a registry, and its configuration's labels and digests of the layers' tars.

    `inventory` is None until the layers are read.
    """

    manifest: Manifest
    labels: Mapping[str, str]
    diff_ids: tuple[str, ...]
    inventory: Inventory | None = None

    @property
    def digest(self) -> str:
        return self.manifest.descriptor.digest


def find_image(registry: Registry, name: str) -> PublishedImage:
    """The image of a tag or digest, without its layers. Raises `RegistryError` when it is absent or damaged."""
    manifest = registry.manifest(name)
    if manifest is None:
        raise RegistryError(
            f"{registry.reference.host} has no {name} in {registry.reference.repository}",
            "check the name; an image that was not promoted has only its staging tag",
        )
    if "layers" not in manifest.content:
        kind = "an index of images" if manifest.descriptor.media_type == INDEX else manifest.descriptor.media_type
        raise RegistryError(
            f"{registry.reference.name}: {name} is {kind}, not an image", "name one image by its digest"
        )
    labels, diff_ids = read_config(registry.blob(manifest.config))
    return PublishedImage(manifest, labels, diff_ids)


def read_layers(registry: Registry, image: PublishedImage) -> PublishedImage:
    """The image with its inventory. Reads every layer to its end and checks its digest, and that of its tar."""
    files: dict[str, bytes] = {}
    diff_ids = []
    for layer in image.manifest.layers:
        with closing(registry.open_blob(layer)) as stream:
            try:
                diff_ids.append(apply_layer(files, stream.as_file()))
            finally:
                stream.check()  # a wrong digest explains why the layer cannot be read
    if tuple(diff_ids) != image.diff_ids:
        raise TrustError("the layers are not those that the image's configuration names", "do not use this image")
    return replace(image, inventory=read_inventory(files))


def fetch_attachment(registry: Registry, image: PublishedImage, artifact: Descriptor) -> bytes:
    """The content of an attachment. Raises `TrustError` unless it refers to this image."""
    manifest = registry.manifest(artifact.digest)
    if manifest is None:
        raise TrustError(f"{artifact.digest} is listed, but the registry does not have it", "publish the image again")
    if manifest.subject != image.digest:
        raise TrustError(f"{artifact.digest} belongs to another image", "do not use this image")
    if len(manifest.layers) != 1:
        raise TrustError(f"{artifact.digest} has {len(manifest.layers)} layers, not one", "publish the image again")
    return registry.blob(manifest.layers[0])


def check_published(
    registry: Registry,
    name: str,
    trust: Trust,
    ca: Path | None = None,
    quick: bool = False,
    newer_than: datetime | None = None,
    published_as: str = "",
) -> VerificationReport:
    """The result of every check. A failed check does not stop the later ones.

    The image must have been published under `published_as`: a tag, and by default `name` if that is one.
    Layers are read only if the signature holds. `quick` asks whether they exist without reading them, and compares no
    bill of materials with them. An image with a commit before `newer_than` fails.
    Raises `RegistryError` when the image is absent, `UnreachableError` when the registry does not answer,
    `SignatureError` without cosign.
    """
    published_as = published_as or ("" if name.startswith("sha256:") else name)
    image = find_image(registry, name)
    checks = [ImageCheck("manifest", True, f"{image.digest}, {len(image.manifest.layers)} layers")]
    signed: dict[str, str] = {}

    def signature() -> str:
        signed.update(matching_signature(registry, image, trust, ca))
        return f"by {trust.key or trust.identity}, over the image and {len(ATTACHMENTS)} attachments"

    def layers() -> str:
        nonlocal image
        if not signed:
            raise TrustError("not read, because no trusted signature covers them", "do not use this image")
        image = (check_existence if quick else read_layers)(registry, image)
        size = sum(layer.size for layer in image.manifest.layers)
        return f"{size / 1e6:.1f} MB, {'present' if quick else 'every byte read'}"

    referrers = {entry.digest: entry for entry in registry.referrers(image.digest)}

    def attachment(kind: str) -> bytes:
        artifact = referrers.get(signed.get(ATTACHMENTS[kind][1], ""))
        if artifact is None:
            raise TrustError("no attachment of the image has the signed digest", "publish the image again")
        return fetch_attachment(registry, image, artifact)

    steps: dict[str, Callable[[], str]] = {
        "signature": signature,
        **({"tag": lambda: check_tag(signed, published_as)} if published_as else {}),
        "layers": layers,
        "labels": lambda: check_labels(image),
        "sbom cyclonedx": lambda: check_sbom(image, attachment("cyclonedx")),
        "sbom spdx": lambda: check_sbom(image, attachment("spdx")),
        "provenance": lambda: check_provenance(image, attachment("provenance"), trust),
    }
    if newer_than:
        steps["date"] = lambda: check_date(image, newer_than)
    checks += [run_check(step, work) for step, work in steps.items()]
    return VerificationReport(str(registry.reference), image.digest, tuple(checks))


def run_check(name: str, work: Callable[[], str]) -> ImageCheck:
    """The result. Raises `SignatureError` and `UnreachableError`, which say nothing about the image."""
    try:
        return ImageCheck(name, True, work())
    except (SignatureError, UnreachableError):
        raise
    except BuildkitError as error:
        return ImageCheck(name, False, str(error))


def check_tag(signed: Mapping[str, str], tag: str) -> str:
    """Raises `TrustError` unless the signature's annotations give this tag to the image."""
    if not signed:
        raise TrustError("not compared, because there is no trusted signature", "do not use this image")
    if TAGS not in signed:
        raise TrustError("its signature names no tags", "verify its digest, or publish the image again")
    if tag not in (tags := signed[TAGS].split()):
        raise TrustError(f"it was published as {', '.join(tags)}, and not as {tag}", "do not use this image")
    return f"published as {tag}"


def check_existence(registry: Registry, image: PublishedImage) -> PublishedImage:
    """The same image. Raises `TrustError` when a layer is absent."""
    absent = [layer.digest for layer in image.manifest.layers if not registry.has_blob(layer)]
    if absent:
        raise TrustError(f"the registry does not have {', '.join(absent)}", "publish the image again")
    return image


def check_labels(image: PublishedImage) -> str:
    lock = image.labels.get("dev.slipway.lock", "")
    if not lock.startswith("sha256:"):
        raise TrustError("the image has no label dev.slipway.lock", "only images from `buildkit build` can be verified")
    if image.inventory is not None:
        inside = image.inventory.manifest
        added = inside.get("extension")
        inside = {**inside, "extension": added.get("digest") if isinstance(added, dict) else None}
        different = [name for name in LABELS if image.labels.get(f"dev.slipway.{name}") != inside.get(name)]
        if image.labels.get(CHANGES, "") != "; ".join(image.inventory.base_changes):
            different.append("base.changes")
        if different:
            raise TrustError(
                f"labels and /etc/slipway/image.json differ in {', '.join(different)}", "do not use this image"
            )
    if changes := image.labels.get(CHANGES):
        raise TrustError(
            f"its base is not the one of its lock: {changes}",
            "it was not made by `buildkit publish`: do not use this image",
        )
    revision = image.labels.get("org.opencontainers.image.revision", "")
    if revision.endswith(UNCOMMITTED):
        raise TrustError(f"it was built with changes that {revision} does not have", "do not use this image")
    return f"{image.labels.get('org.opencontainers.image.title', 'untitled')}, lock {lock[:19]}"


def check_date(image: PublishedImage, newer_than: datetime) -> str:
    """The date of the image's commit. Raises `TrustError` when it is older."""
    text = image.labels.get("org.opencontainers.image.created", "")
    try:
        created = datetime.fromisoformat(text)
        old = created < newer_than
    except (ValueError, TypeError) as error:
        raise TrustError(f"the image has no date with a time zone: {text!r}", "do not use this image") from error
    if old:
        raise TrustError(
            f"its commit is of {text}, before {newer_than.isoformat()}", "somebody may have moved a tag to an old image"
        )
    return f"its commit is of {text}"


def check_sbom(image: PublishedImage, content: bytes) -> str:
    """A summary. Raises `TrustError` unless the document lists exactly the installed packages and the image's lock."""
    try:
        document = json.loads(content)
        listed = sbom.listed_purls(document)
        names_lock = image.labels["dev.slipway.lock"] in content.decode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TrustError(f"the document cannot be read: {error!r}", "publish the image again") from error
    if not names_lock:
        raise TrustError("the document names another lock than the image", "do not use this image")
    if image.inventory is None:
        return f"{len(listed)} packages listed, not compared with the layers"
    installed = sbom.installed_purls(image.inventory)
    if odd := sorted(listed ^ installed):
        raise TrustError(f"{len(odd)} packages differ from those installed, first {odd[0]}", "do not use this image")
    return f"{len(listed)} packages, exactly those installed"


def check_provenance(image: PublishedImage, content: bytes, trust: Trust) -> str:
    """A summary. An envelope must have the trusted key's signature; a keyless publisher attaches the statement alone,
    which only the image's signature covers. Raises `TrustError`."""
    if dsse.is_envelope(content):
        if trust.key:
            dsse.check_signature(content, trust.key, provenance.PREDICATE)
        content, _ = dsse.open_envelope(content)
    return provenance.check_statement(content, image.digest, image.labels)


def matching_signature(registry: Registry, image: PublishedImage, trust: Trust, ca: Path | None) -> dict[str, str]:
    """The annotations of the newest signature that names an attachment of each kind."""
    named = [name for _, name in ATTACHMENTS.values()]
    for annotations in reversed(signed_annotations(registry.reference.at(image.digest), trust, ca)):
        if all(name in annotations for name in named):
            return annotations
    raise TrustError("the signature does not cover the attachments", "publish the image again")
