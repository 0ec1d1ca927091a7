"""Checks a published image from outside, with nothing but the registry and cosign: no engine, no checkout.

What is checked: the manifest and every blob against their digests, the signature over the image and its attachments,
both bills of materials against what the layers contain, the provenance, and that all of them name one lock.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from buildkit.errors import BuildkitError, RegistryError, TrustError
from buildkit.publishing import provenance, sbom
from buildkit.publishing.inventory import Inventory, apply_layer, read_inventory
from buildkit.publishing.signature import Trust, signed_annotations
from buildkit.registry.client import Registry
from buildkit.registry.content import INDEX, Descriptor, Manifest, read_object

# What is attached, and the name of the annotation under which its digest is signed.
ATTACHMENTS = {
    "cyclonedx": (sbom.MEDIA_TYPES["cyclonedx"], "dev.slipway.sbom.cyclonedx"),
    "spdx": (sbom.MEDIA_TYPES["spdx"], "dev.slipway.sbom.spdx"),
    "provenance": (provenance.MEDIA_TYPE, "dev.slipway.provenance"),
}
LABELS = ("target", "variant", "lock")  # of the image, `dev.slipway.…`; its manifest file says the same


@dataclass(frozen=True)
class Check:
    """`detail` says what was found, or why the check failed."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class Report:
    reference: str
    digest: str
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)


@dataclass(frozen=True)
class Image:
    """A published image: its manifest and labels. `inventory` is None where the layers were not read."""

    manifest: Manifest
    labels: Mapping[str, str]
    inventory: Inventory | None = None

    @property
    def digest(self) -> str:
        return self.manifest.descriptor.digest


def find_image(registry: Registry, name: str) -> Image:
    """The image of a tag or digest, its layers unread. Raises `RegistryError` when it is absent or damaged."""
    manifest = registry.manifest(name)
    if manifest is None:
        raise RegistryError(
            f"{registry.reference.host} has no {name} in {registry.reference.repository}",
            "check the name; what was never promoted has only its staging tag",
        )
    if "layers" not in manifest.content:
        kind = "an index of images" if manifest.descriptor.media_type == INDEX else manifest.descriptor.media_type
        raise RegistryError(
            f"{registry.reference.name}: {name} is {kind}, not an image", "name one image by its digest"
        )
    config = read_object(registry.blob(manifest.config))
    return Image(manifest, (config.get("config") or {}).get("Labels") or {})


def read_layers(registry: Registry, image: Image) -> Image:
    """Reads every layer to its end, checking its digest, and says what is inside."""
    files: dict[str, bytes] = {}
    for layer in image.manifest.layers:
        with closing(registry.open_blob(layer)) as stream:
            try:
                apply_layer(files, stream.as_file())
            finally:
                stream.check()  # that its digest is wrong says more than that it cannot be read
    return Image(image.manifest, image.labels, read_inventory(files))


def fetch_attachment(registry: Registry, image: Image, artifact: Descriptor) -> bytes:
    """The content of an attachment, once it is certain that it refers to this image."""
    manifest = registry.manifest(artifact.digest)
    if manifest is None:
        raise TrustError(f"{artifact.digest} is listed but not there", "publish the image again")
    if manifest.content.get("subject", {}).get("digest") != image.digest:
        raise TrustError(f"{artifact.digest} belongs to another image", "do not use this image")
    if len(manifest.layers) != 1:
        raise TrustError(f"{artifact.digest} has {len(manifest.layers)} layers, not one", "publish the image again")
    return registry.blob(manifest.layers[0])


def check_published(registry: Registry, name: str, trust: Trust, ca: Path | None = None, quick: bool = False) -> Report:
    """Every check, in an order in which each may rely on those before it; a failed one does not hide the next.

    `quick` leaves the layers where they are: it asks only whether they exist, and no bill of materials is compared.
    Raises `RegistryError` when there is no such image or no answer.
    """
    image = find_image(registry, name)
    checks = [Check("manifest", True, f"{image.digest}, {len(image.manifest.layers)} layers")]
    reading = check_existence if quick else read_layers
    try:
        image = reading(registry, image)
        size = sum(layer.size for layer in image.manifest.layers)
        checks.append(Check("layers", True, f"{size / 1e6:.1f} MB, {'present' if quick else 'every byte read'}"))
    except BuildkitError as error:
        checks.append(Check("layers", False, str(error)))

    signed: dict[str, str] = {}

    def signature() -> str:
        signed.update(matching_signature(registry, image, trust, ca))
        return f"by {trust.key or trust.identity}, over the image and {len(ATTACHMENTS)} attachments"

    referrers = {entry.digest: entry for entry in registry.referrers(image.digest)}

    def attachment(kind: str) -> bytes:
        artifact = referrers.get(signed.get(ATTACHMENTS[kind][1], ""))
        if artifact is None:
            raise TrustError("none that the signature names is attached to the image", "publish the image again")
        return fetch_attachment(registry, image, artifact)

    steps: dict[str, Callable[[], str]] = {
        "labels": lambda: check_labels(image),
        "signature": signature,
        "sbom cyclonedx": lambda: check_sbom(image, attachment("cyclonedx")),
        "sbom spdx": lambda: check_sbom(image, attachment("spdx")),
        "provenance": lambda: check_provenance(image, attachment("provenance")),
    }
    checks += [run_check(step, work) for step, work in steps.items()]
    return Report(str(registry.reference), image.digest, tuple(checks))


def run_check(name: str, work: Callable[[], str]) -> Check:
    try:
        return Check(name, True, work())
    except (TrustError, RegistryError) as error:
        return Check(name, False, str(error))


def check_existence(registry: Registry, image: Image) -> Image:
    absent = [layer.digest for layer in image.manifest.layers if not registry.has_blob(layer)]
    if absent:
        raise TrustError(f"the registry lacks {', '.join(absent)}", "publish the image again")
    return image


def check_labels(image: Image) -> str:
    lock = image.labels.get("dev.slipway.lock", "")
    if not lock.startswith("sha256:"):
        raise TrustError(
            "the image has no label dev.slipway.lock", "only images that `buildkit build` made can be checked"
        )
    if image.inventory is not None:
        said = image.inventory.manifest
        other = [name for name in LABELS if image.labels.get(f"dev.slipway.{name}") != said.get(name)]
        if other:
            raise TrustError(
                f"labels and /etc/slipway/image.json differ in {', '.join(other)}", "do not use this image"
            )
    return f"{image.labels.get('org.opencontainers.image.title', 'untitled')}, lock {lock[:19]}"


def check_sbom(image: Image, content: bytes) -> str:
    """Whether the document lists exactly what is installed, and names the image's lock."""
    try:
        document = json.loads(content)
        listed = sbom.listed(document)
        tied = image.labels["dev.slipway.lock"] in content.decode()
    except (ValueError, KeyError, TypeError) as error:
        raise TrustError(f"the document cannot be understood: {error!r}", "publish the image again") from error
    if not tied:
        raise TrustError("the document names another lock than the image", "do not use this image")
    if image.inventory is None:
        return f"{len(listed)} packages listed, not compared"
    found = sbom.installed(image.inventory)
    if odd := sorted(listed ^ found):
        raise TrustError(f"{len(odd)} packages differ from what is installed, first {odd[0]}", "do not use this image")
    return f"{len(listed)} packages, exactly those installed"


def check_provenance(image: Image, content: bytes) -> str:
    lock = image.labels.get("dev.slipway.lock", "")
    revision = image.labels.get("org.opencontainers.image.revision", "")
    return provenance.check_statement(content, image.digest, lock, revision)


def matching_signature(registry: Registry, image: Image, trust: Trust, ca: Path | None) -> dict[str, str]:
    """The annotations of the newest signature that names an attachment of each kind."""
    named = [name for _, name in ATTACHMENTS.values()]
    for annotations in reversed(signed_annotations(registry.reference.at(image.digest), trust, ca)):
        if all(name in annotations for name in named):
            return annotations
    raise TrustError("the signature does not cover the attachments", "publish the image again")
