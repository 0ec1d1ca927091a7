"""Each check of a published image fails on a single difference."""

import json
from typing import Any

import pytest

from buildkit.errors import TrustError
from buildkit.publishing import sbom
from buildkit.publishing.check import (
    PublishedImage,
    check_labels,
    check_published,
    check_sbom,
    fetch_attachment,
    find_image,
    read_layers,
)
from buildkit.publishing.signature import Trust
from buildkit.registry.client import Registry
from buildkit.registry.content import Descriptor
from tests.publish.conftest import (
    LABELS,
    LOCK,
    Server,
    base_layers,
    image_json,
    push_image,
    stage,
    wheel_metadata,
)

OTHER_LOCK = "sha256:" + "0" * 64
FORMATS = {"cyclonedx": sbom.cyclonedx, "spdx": sbom.spdx}


@pytest.fixture
def image(registry: Registry) -> PublishedImage:
    return stage(registry)[0]


def with_extra_wheel(registry: Registry) -> PublishedImage:
    digest = push_image(registry, "larger", [*base_layers(), wheel_metadata("extra", "1")])
    return read_layers(registry, find_image(registry, digest))


def document(image: PublishedImage, kind: str) -> dict[str, Any]:
    assert image.inventory
    return FORMATS[kind](sbom.describe_image(image.inventory, image.labels, LOCK, image.digest))


def attach(registry: Registry, subject: Descriptor) -> Descriptor:
    return registry.attach(subject, sbom.MEDIA_TYPES["spdx"], b"{}", {})


# ---- attachments -----------------------------------------------------------------------------------------------------


def test_attachment_of_the_image_is_fetched(registry: Registry, image: PublishedImage) -> None:
    assert fetch_attachment(registry, image, attach(registry, image.manifest.descriptor)) == b"{}"


def test_attachment_of_another_image_is_refused(registry: Registry, image: PublishedImage) -> None:
    other = find_image(registry, push_image(registry, "other", labels={**LABELS, "dev.slipway.variant": "other"}))
    with pytest.raises(TrustError, match="belongs to another image"):
        fetch_attachment(registry, image, attach(registry, other.manifest.descriptor))


def test_manifest_without_a_subject_is_no_attachment(registry: Registry, image: PublishedImage) -> None:
    with pytest.raises(TrustError, match="belongs to another image"):
        fetch_attachment(registry, image, image.manifest.descriptor)


# ---- bills of materials ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FORMATS)
def test_sbom_of_the_image_passes(image: PublishedImage, kind: str) -> None:
    assert check_sbom(image, sbom.encode(document(image, kind))) == "4 packages, exactly those installed"


@pytest.mark.parametrize("kind", FORMATS)
def test_sbom_that_omits_an_installed_package_is_refused(registry: Registry, image: PublishedImage, kind: str) -> None:
    larger = with_extra_wheel(registry)
    with pytest.raises(TrustError, match=r"1 packages differ .*pkg:pypi/extra@1"):
        check_sbom(larger, sbom.encode(document(image, kind)))


@pytest.mark.parametrize("kind", FORMATS)
def test_sbom_that_lists_an_absent_package_is_refused(registry: Registry, image: PublishedImage, kind: str) -> None:
    larger = with_extra_wheel(registry)
    with pytest.raises(TrustError, match=r"1 packages differ .*pkg:pypi/extra@1"):
        check_sbom(image, sbom.encode(document(larger, kind)))


@pytest.mark.parametrize("kind", FORMATS)
def test_sbom_of_another_lock_is_refused(image: PublishedImage, kind: str) -> None:
    other = PublishedImage(image.manifest, {**image.labels, "dev.slipway.lock": OTHER_LOCK}, image.inventory)
    with pytest.raises(TrustError, match="another lock"):
        check_sbom(other, sbom.encode(document(image, kind)))


# ---- labels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "value"), [("target", "cuda"), ("variant", "other"), ("lock", OTHER_LOCK)])
def test_label_that_contradicts_the_image_is_refused(image: PublishedImage, name: str, value: str) -> None:
    check_labels(image)
    changed = PublishedImage(image.manifest, {**image.labels, f"dev.slipway.{name}": value}, image.inventory)
    with pytest.raises(TrustError, match=f"differ in {name}"):
        check_labels(changed)


def test_image_without_a_lock_label_is_refused(image: PublishedImage) -> None:
    with pytest.raises(TrustError, match=r"no label dev\.slipway\.lock"):
        check_labels(PublishedImage(image.manifest, {}, None))


def test_published_image_whose_labels_lie_fails(registry: Registry, shared_server: Server, trust: Trust) -> None:
    layers = [*base_layers(), {"etc/slipway/image.json": json.dumps({**image_json(), "variant": "other"})}]
    push_image(registry, "cpu", layers)
    report = check_published(registry, "cpu", trust, shared_server.ca)
    labels = next(check for check in report.checks if check.name == "labels")
    assert not labels.passed
    assert "differ in variant" in labels.detail
