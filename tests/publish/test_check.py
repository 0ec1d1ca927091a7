"""Each check of a published image fails on a single difference."""

import gzip
import io
import json
import tarfile
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import zstandard

from buildkit.errors import InventoryError, RegistryError, TrustError
from buildkit.publishing import sbom
from buildkit.publishing.check import (
    PublishedImage,
    check_date,
    check_labels,
    check_published,
    check_sbom,
    fetch_attachment,
    find_image,
    read_layers,
)
from buildkit.publishing.inventory import apply_layer
from buildkit.publishing.provenance import BuildRecord
from buildkit.registry.client import Registry
from buildkit.registry.content import Descriptor
from buildkit.registry.signature import Signer, Trust
from tests.publish.conftest import (
    LABELS,
    LOCK,
    Server,
    base_layers,
    image_json,
    push_image,
    release,
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
def test_sbom_that_omits_an_installed_package_or_lists_an_absent_one_is_refused(
    registry: Registry, image: PublishedImage, kind: str
) -> None:
    larger = with_extra_wheel(registry)
    for installed, listed in ((larger, image), (image, larger)):
        with pytest.raises(TrustError, match=r"1 packages differ .*pkg:pypi/extra@1"):
            check_sbom(installed, sbom.encode(document(listed, kind)))


@pytest.mark.parametrize("kind", FORMATS)
def test_sbom_of_another_lock_is_refused(image: PublishedImage, kind: str) -> None:
    other = replace(image, labels={**image.labels, "dev.slipway.lock": OTHER_LOCK})
    with pytest.raises(TrustError, match="another lock"):
        check_sbom(other, sbom.encode(document(image, kind)))


# ---- labels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "value"), [("target", "cuda"), ("variant", "other"), ("lock", OTHER_LOCK)])
def test_label_that_contradicts_the_image_is_refused(image: PublishedImage, name: str, value: str) -> None:
    check_labels(image)
    changed = replace(image, labels={**image.labels, f"dev.slipway.{name}": value})
    with pytest.raises(TrustError, match=f"differ in {name}"):
        check_labels(changed)


def test_image_whose_base_is_not_the_locked_one_is_refused(registry: Registry, image: PublishedImage) -> None:
    label = {**LABELS, "dev.slipway.base.changes": "tini 1 -> 2"}
    manifest = image_json()
    manifest["base"]["changes"] = [{"package": "tini", "locked": "1", "installed": "2"}]
    layers = [*base_layers(), {"etc/slipway/image.json": json.dumps(manifest)}]
    push_image(registry, "changed", layers, label)
    with pytest.raises(TrustError, match=r"its base is not the one of its lock: tini 1 -> 2"):
        check_labels(read_layers(registry, find_image(registry, "changed")))
    with pytest.raises(TrustError, match=r"its base is not the one of its lock: tini 1 -> 2"):
        check_labels(replace(image, labels=label, inventory=None))
    push_image(registry, "hidden", layers)
    with pytest.raises(TrustError, match=r"differ in base\.changes"):
        check_labels(read_layers(registry, find_image(registry, "hidden")))


def test_image_without_a_lock_label_is_refused(image: PublishedImage) -> None:
    with pytest.raises(TrustError, match=r"no label dev\.slipway\.lock"):
        check_labels(replace(image, labels={}))


def test_published_image_whose_labels_lie_fails(registry: Registry) -> None:
    layers = [*base_layers(), {"etc/slipway/image.json": json.dumps({**image_json(), "variant": "other"})}]
    push_image(registry, "cpu", layers)
    with pytest.raises(TrustError, match="differ in variant"):
        check_labels(read_layers(registry, find_image(registry, "cpu")))


# ---- layers ----------------------------------------------------------------------------------------------------------


def test_layers_are_not_read_before_a_trusted_signature(
    registry: Registry, shared_server: Server, trust: Trust, login: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    push_image(registry, "cpu")
    monkeypatch.setattr("buildkit.publishing.check.apply_layer", pytest.fail)
    report = check_published(registry, "cpu", trust, shared_server.ca)
    details = {check.name: check.detail for check in report.checks if not check.passed}
    assert "no signature by the key" in details["signature"]
    assert "not read" in details["layers"]


def test_layers_that_the_configuration_does_not_name_are_refused(registry: Registry) -> None:
    """The engine takes the configuration's word for the layers' content, so that must be the digest of it."""
    manifest = find_image(registry, push_image(registry, "first")).manifest.content
    larger = find_image(registry, push_image(registry, "larger", [*base_layers(), {"evil": "x"}])).manifest.content
    mixed = json.dumps({**manifest, "layers": larger["layers"]}).encode()
    registry.put_manifest("mixed", mixed, manifest["mediaType"])
    with pytest.raises(TrustError, match="not those that the image's configuration names"):
        read_layers(registry, find_image(registry, "mixed"))


@pytest.mark.parametrize("config", [{}, {"rootfs": None}, {"rootfs": {"diff_ids": 1}}, {"config": []}])
def test_configuration_that_is_no_images_is_refused(registry: Registry, config: dict[str, Any]) -> None:
    manifest = find_image(registry, push_image(registry, "first")).manifest.content
    blob = registry.put_blob(json.dumps(config).encode(), "application/vnd.oci.image.config.v1+json")
    registry.put_manifest("odd", json.dumps({**manifest, "config": blob.as_json()}).encode(), manifest["mediaType"])
    with pytest.raises(RegistryError, match="configuration is no image's"):
        find_image(registry, "odd")


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.REGTYPE])
def test_layer_that_would_fill_the_memory_is_refused(kind: bytes, pack: Callable[[bytes], bytes]) -> None:
    """A few kilobytes hold gigabytes of zeros: as a wheel's metadata, or as a header."""
    member = tarfile.TarInfo(next(iter(wheel_metadata("bomb", "1"))))
    member.size, member.type = 2**31, kind
    with pytest.raises(InventoryError, match=r"needs 2147\d+ bytes"):
        apply_layer({}, io.BytesIO(pack(member.tobuf() + bytes(2**20))))


# ---- date ------------------------------------------------------------------------------------------------------------

MAY = datetime(2026, 5, 1, tzinfo=UTC)


def test_signed_old_image_under_a_new_tag_is_refused(
    registry: Registry, shared_server: Server, record: BuildRecord, signer: Signer, trust: Trust, login: None
) -> None:
    image, tags = stage(registry)
    release(registry, image, tags, record, LOCK, signer, shared_server.ca)
    created = datetime.fromisoformat(LABELS["org.opencontainers.image.created"])
    for newer_than, passed in ((created, True), (created + timedelta(seconds=1), False)):
        report = check_published(registry, "cpu", trust, shared_server.ca, quick=True, newer_than=newer_than)
        assert report.passed == passed
        assert [check.name for check in report.checks if not check.passed] == [] if passed else ["date"]


@pytest.mark.parametrize("text", ["", "yesterday", "2026-11-21T10:00:00"])
def test_image_without_a_date_is_not_newer(image: PublishedImage, text: str) -> None:
    with pytest.raises(TrustError, match="no date with a time zone"):
        check_date(replace(image, labels={"org.opencontainers.image.created": text}), MAY)
