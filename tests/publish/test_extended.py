"""An extended image, published: what a user added is listed, labelled and recorded, under names of its own."""

import json
from dataclasses import replace
from typing import Any

import pytest

from buildkit.errors import ExtensionError, InventoryError, TrustError
from buildkit.images.parent import Parent, find_parent
from buildkit.publishing import provenance, sbom
from buildkit.publishing.check import PublishedImage, check_labels, check_sbom, find_image, read_layers
from buildkit.publishing.provenance import BuildRecord
from buildkit.publishing.publish import ReleaseRequest, tags_for
from buildkit.publishing.rebuild import check_rebuild
from buildkit.recipe.dockerfile import CHANGES
from buildkit.recipe.extension import Extension
from buildkit.recipe.lock_file import read_lock
from buildkit.recipe.matrix import load_matrix
from buildkit.recipe.project import project_version
from buildkit.registry.client import Registry
from buildkit.registry.reference import parse_reference
from buildkit.registry.signature import Signer
from buildkit.running.engine import Docker, LocalImage
from tests.buildkit.conftest import ROOT
from tests.publish.conftest import LABELS, LOCK, Server, base_layers, image_json, push_image, wheel_metadata

DIGEST, FOLDER = "sha256:" + "e" * 64, "sha256:" + "f" * 64
ADDED = {"digest": DIGEST, "requirements": ["extra"], "packages": [], "folders": {"mine": FOLDER}}
EXTENSION_LOCK = f"# base: slipway:cpu-small -\nextra==1 \\\n    --hash=sha256:{'7' * 64}\n"


def extended(
    registry: Registry, label: str = DIGEST, lock: str = EXTENSION_LOCK, changed: bool = False
) -> PublishedImage:
    manifest = image_json() | {"extension": ADDED}
    if changed:
        manifest["base"] = {**manifest["base"], "changes": [{"package": "tini", "locked": "1", "installed": "2"}]}
    layer = {
        **wheel_metadata("extra", "1"),
        "etc/slipway/extension.txt": lock,
        "etc/slipway/image.json": json.dumps(manifest),
    }
    labels = LABELS | {"dev.slipway.extension": label} | ({CHANGES: "tini 1 -> 2"} if changed else {})
    return read_layers(
        registry, find_image(registry, push_image(registry, "extended", [*base_layers(), layer], labels))
    )


def document(image: PublishedImage, kind: str) -> dict[str, Any]:
    assert image.inventory
    make = {"cyclonedx": sbom.cyclonedx, "spdx": sbom.spdx}[kind]
    return make(sbom.describe_image(image.inventory, image.labels, LOCK, image.digest))


def test_additions_are_in_the_cyclonedx_bill_with_their_hashes(registry: Registry) -> None:
    bill = document(extended(registry), "cyclonedx")
    hashes = {part["name"]: [entry["content"] for entry in part.get("hashes", ())] for part in bill["components"]}
    assert hashes["extra"] == ["7" * 64]
    assert hashes["/opt/slipway/extension/mine"] == ["f" * 64]
    assert hashes["torch"] == ["1" * 64], "the image's own lock still counts"
    assert {"name": "dev.slipway.extension", "value": DIGEST} in bill["metadata"]["component"]["properties"]


def test_additions_are_in_the_spdx_bill_with_their_hashes(registry: Registry) -> None:
    bill = document(extended(registry), "spdx")
    sums = {part["name"]: [entry["checksumValue"] for entry in part.get("checksums", ())] for part in bill["packages"]}
    assert sums["extra"] == ["7" * 64]
    assert sums["/opt/slipway/extension/mine"] == ["f" * 64]


@pytest.mark.parametrize("kind", ["cyclonedx", "spdx"])
def test_the_bill_passes_the_check_of_a_stranger(registry: Registry, kind: str) -> None:
    image = extended(registry)
    assert "exactly those installed" in check_sbom(image, sbom.encode(document(image, kind)))


def test_a_label_of_other_additions_than_the_image_has_is_refused(registry: Registry) -> None:
    check_labels(extended(registry))
    for label in ("sha256:" + "0" * 64, ""):
        with pytest.raises(TrustError, match="differ in extension"):
            check_labels(extended(registry, label))


def test_an_extended_image_on_another_base_than_the_locked_one_says_both(registry: Registry) -> None:
    image = extended(registry, changed=True)
    with pytest.raises(TrustError, match=r"its base is not the one of its lock: tini 1 -> 2"):
        check_labels(image)
    properties = document(image, "cyclonedx")["metadata"]["component"]["properties"]
    said = {entry["name"]: entry["value"] for entry in properties}
    assert said["dev.slipway.extension"] == DIGEST
    assert said["dev.slipway.base.changes"] == "tini 1 -> 2"


def test_a_damaged_lock_of_additions_is_refused(registry: Registry) -> None:
    with pytest.raises(InventoryError, match=r"/etc/slipway/extension\.txt in the image"):
        extended(registry, lock="# epoch: soon\n")


def test_the_provenance_names_the_additions(record: BuildRecord) -> None:
    def dependencies(record: BuildRecord) -> dict[str, dict[str, str]]:
        made = provenance.statement("slipway", DIGEST, record, provenance.read_builder({}))
        parts = made["predicate"]["buildDefinition"]["resolvedDependencies"]
        return {part["name"]: part.get("digest", {}) for part in parts}

    assert dependencies(replace(record, extension=DIGEST))["extension"] == {"sha256": "e" * 64}
    assert "extension" not in dependencies(record)


def test_tags_of_an_extended_image_are_its_own() -> None:
    matrix = load_matrix(ROOT)
    variant = matrix.variant("cpu")
    request = ReleaseRequest(matrix, variant, parse_reference("registry.example.com/slipway"), Signer(""))
    plain = tags_for(request, DIGEST)
    extended_tags = tags_for(replace(request, variant=variant.extended(Extension(packages=("jq",)))), DIGEST)
    assert "cpu" in plain.promoted
    assert not set(plain.promoted) & set(extended_tags.promoted)
    assert all(tag.startswith(f"cpu-{variant.name}-extended") for tag in extended_tags.promoted)


def test_a_rebuild_of_an_extended_image_is_refused(registry: Registry) -> None:
    check = check_rebuild(registry, extended(registry).digest, ROOT, Docker.__new__(Docker))
    assert not check.passed
    assert "its user's additions are in no commit" in check.detail


# ---- what `build --from` starts from ---------------------------------------------------------------------------------


class EngineWithoutImages(Docker):
    """An engine that has pulled nothing."""

    def __init__(self) -> None:
        pass

    def find(self, _reference: str) -> LocalImage | None:
        return None


def parent(registry: Registry, shared_server: Server, **labels: str) -> tuple[str, Parent]:
    """The digest of an image with these labels in the registry, and what `--from` makes of its tag."""
    matrix = load_matrix(ROOT)
    variant = matrix.variant("cpu")
    lock = read_lock(matrix, variant)
    files = {
        **LABELS,
        "dev.slipway.variant": variant.name,
        "dev.slipway.lock": f"sha256:{lock.digest}",
        "dev.slipway.base.provider": "bootstrap",
        "org.opencontainers.image.version": project_version(ROOT),
    }
    named = {name.replace("__", "."): value for name, value in labels.items()}
    digest = push_image(registry, "parent", base_layers(), {k: v for k, v in {**files, **named}.items() if v})
    reference = str(registry.reference.tagged("parent"))
    return digest, find_parent(reference, matrix, variant, lock, EngineWithoutImages(), shared_server.ca)


def test_an_image_in_a_registry_is_extended_by_its_digest(
    registry: Registry, shared_server: Server, login: None
) -> None:
    digest, manifest = parent(registry, shared_server)
    assert (manifest.reference, manifest.provider) == (str(registry.reference.at(digest)), "bootstrap")


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ({"org__opencontainers__image__version": "0.0.9"}, r"is of Slipway 0\.0\.9, and this is Slipway"),
        ({"dev__slipway__variant": "other"}, "is an image of cpu-other, not of cpu-"),
        ({"dev__slipway__target": "cuda"}, "is an image of cuda-"),
        ({"dev__slipway__lock": "sha256:" + "0" * 64}, "has the lock sha256:000000000000, and"),
        ({"dev__slipway__lock": ""}, "is no image of Slipway"),
        ({"dev__slipway__extension": DIGEST}, "is extended already"),
    ],
)
def test_another_image_is_refused_by_its_labels(
    registry: Registry, shared_server: Server, login: None, labels: dict[str, str], words: str
) -> None:
    with pytest.raises(ExtensionError, match=words) as caught:
        parent(registry, shared_server, **labels)
    assert caught.value.hint


def test_an_image_without_a_registry_is_named() -> None:
    matrix = load_matrix(ROOT)
    variant = matrix.variant("cpu")
    with pytest.raises(ExtensionError, match="there is no image slipway:absent here"):
        find_parent("slipway:absent", matrix, variant, read_lock(matrix, variant), EngineWithoutImages())
