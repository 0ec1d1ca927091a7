"""The image that a user extends with `build --from`: of this variant, this lock and this version, or refused."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from buildkit.errors import ExtensionError, RegistryError
from buildkit.recipe.dockerfile import CHANGES
from buildkit.recipe.lock import Lock, PackageChange, parse_changes
from buildkit.recipe.matrix import Matrix, Variant
from buildkit.recipe.project import project_version
from buildkit.registry.client import Registry
from buildkit.registry.content import read_config
from buildkit.registry.credentials import read_credentials
from buildkit.registry.reference import parse_reference
from buildkit.running.engine import ContainerEngine, full_name

OWN_STAGE = "image"  # the stage of Dockerfile.j2 that makes the variant's image


@dataclass(frozen=True)
class Parent:
    """`reference` is what a Dockerfile starts FROM, `provider` that of the image's base.

    `changes` say how that base differs from the lock.
    """

    reference: str
    provider: str
    changes: tuple[PackageChange, ...] = ()


def find_parent(
    name: str, matrix: Matrix, variant: Variant, lock: Lock, engine: ContainerEngine, ca: Path | None = None
) -> Parent:
    """The image of this name on the engine, or else in its registry, there by its digest.

    Raises `ExtensionError` for an image of another version, variant or lock, or one that is extended already, and
    `RegistryError` if there is none.
    """
    local = engine.find(name)
    reference, labels = (name, local.labels) if local else in_registry(name, ca)
    refuse_other(name, labels, matrix, variant, lock)
    try:
        changes = parse_changes(labels.get(CHANGES, ""))
    except ValueError as error:
        raise ExtensionError(f"{name}: the label {CHANGES} is malformed: {error}", "build the image again") from error
    return Parent(reference, labels["dev.slipway.base.provider"], changes)


def in_registry(name: str, ca: Path | None) -> tuple[str, Mapping[str, str]]:
    """The image by its digest, and its labels."""
    if full_name(name) != name:
        raise ExtensionError(f"there is no image {name} here", "build it, or name it with its registry: HOST/NAME:TAG")
    image = parse_reference(name)
    registry = Registry(image, read_credentials(image.host), ca)
    manifest = registry.manifest(image.digest or image.tag or "latest")
    if manifest is None:
        raise RegistryError(f"there is no image {name}", "check the name; an unpublished image has a staging tag only")
    labels, _ = read_config(registry.blob(manifest.config))
    return str(image.at(manifest.descriptor.digest)), labels


def refuse_other(name: str, labels: Mapping[str, str], matrix: Matrix, variant: Variant, lock: Lock) -> None:
    wanted = variant.stock.identifier
    if not {"dev.slipway.lock", "dev.slipway.base.provider"} <= set(labels):
        raise ExtensionError(f"{name} is no image of Slipway", "name one that `buildkit build` or `publish` made")
    if "dev.slipway.extension" in labels:
        raise ExtensionError(f"{name} is extended already", "name the image that it was made from")
    version, expected = labels.get("org.opencontainers.image.version", "none"), project_version(matrix.root)
    if version != expected:
        raise ExtensionError(
            f"{name} is of Slipway {version}, and this is Slipway {expected}",
            f"install slipway-rl {version} to extend it, or name an image of {expected}",
        )
    identifier = f"{labels.get('dev.slipway.target')}-{labels.get('dev.slipway.variant')}"
    if identifier != wanted:
        raise ExtensionError(f"{name} is an image of {identifier}, not of {wanted}", "name its --target and --variant")
    if labels["dev.slipway.lock"] != f"sha256:{lock.digest}":
        raise ExtensionError(
            f"{name} has the lock {labels['dev.slipway.lock'][:19]}, and {wanted} has sha256:{lock.digest[:12]} here",
            "build from the commit in its label org.opencontainers.image.revision, or name a newer image",
        )
