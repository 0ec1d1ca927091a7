"""Bills of materials are valid, reproducible, and list exactly the contents of the image."""

import gzip
import io
import json
from collections.abc import Callable
from typing import Any

import pytest
import zstandard
from cyclonedx.schema import OutputFormat, SchemaVersion
from cyclonedx.validation import make_schemabased_validator
from spdx_tools.spdx.jsonschema.document_converter import DocumentConverter
from spdx_tools.spdx.parser.jsonlikedict.json_like_dict_parser import JsonLikeDictParser
from spdx_tools.spdx.validation.document_validator import validate_full_spdx_document

from buildkit.errors import InventoryError
from buildkit.publishing import sbom
from buildkit.publishing.inventory import Inventory, apply_layer, read_inventory, read_wheel
from tests.publish.conftest import LABELS, LOCK, LOCK_DIGEST, base_layers, make_layer, wheel_metadata

DIGEST = "sha256:" + "d" * 64


def read(layers: list[dict[str, str]]) -> Inventory:
    files: dict[str, bytes] = {}
    for layer in layers:
        apply_layer(files, io.BytesIO(make_layer(layer)))
    return read_inventory(files)


@pytest.fixture
def bill() -> sbom.Bill:
    return sbom.describe_image(read(base_layers()), LABELS, LOCK, DIGEST)


@pytest.fixture(params=["cyclonedx", "spdx"])
def document(request: pytest.FixtureRequest, bill: sbom.Bill) -> dict[str, Any]:
    made: dict[str, Any] = getattr(sbom, request.param)(bill)
    return made


def test_inventory_honours_deletions_by_upper_layers() -> None:
    inventory = read(base_layers())
    assert (inventory.system, inventory.release) == ("debian", "12")
    assert [wheel.name for wheel in inventory.wheels] == ["torch", "typing-extensions"]
    assert [package.name for package in inventory.packages] == ["libstdc++6", "tini"]
    assert inventory.packages[0].source == "gcc-12"
    assert inventory.manifest["lock"] == LOCK_DIGEST


def test_package_without_a_name_is_refused() -> None:
    status = "Package: \nStatus: install ok installed\nVersion: 1\nArchitecture: amd64\n"
    with pytest.raises(InventoryError, match="a package has no Package"):
        read([*base_layers(), {"var/lib/dpkg/status": status}])


def test_opaque_folder_hides_everything_below_it() -> None:
    inventory = read([*base_layers(), {"opt/slipway/venv/.wh..wh..opq": ""}])
    assert inventory.wheels == ()


def test_foreign_image_is_refused() -> None:
    with pytest.raises(InventoryError, match=r"no /etc/slipway/image.json"):
        read([{"etc/hostname": "x"}])


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_damaged_layer_is_refused(pack: Callable[[bytes], bytes]) -> None:
    whole = pack(gzip.decompress(make_layer({"a": str(list(range(5000)))})))
    for content in (whole[:-100], whole[: len(whole) // 2], b"no tar at all"):
        with pytest.raises(InventoryError, match="not a tar archive"):
            apply_layer({}, io.BytesIO(content))


@pytest.mark.parametrize(
    ("lines", "spdx", "name"),
    [
        (("License-Expression: MIT OR Apache-2.0",), "MIT OR Apache-2.0", ""),
        (("License: Apache License, Version 2.0",), "Apache-2.0", ""),
        (("Classifier: License :: OSI Approved :: MIT License",), "MIT", ""),
        (("License: BSD",), "", "BSD"),
        (("Classifier: License :: OSI Approved :: BSD License",), "", "BSD License"),
        (("License: MIT", "Classifier: License :: OSI Approved :: ISC License"), "", "MIT"),
        ((), "", ""),
    ],
)
def test_license_is_an_spdx_expression_only_where_it_is_certain(lines: tuple[str, ...], spdx: str, name: str) -> None:
    wheel = read_wheel(next(iter(wheel_metadata("Some.Name", "1", *lines).values())))
    assert (wheel.name, wheel.license, wheel.license_name) == ("some-name", spdx, name)


def test_cyclonedx_document_passes_its_schema(bill: sbom.Bill) -> None:
    validator = make_schemabased_validator(OutputFormat.JSON, SchemaVersion.V1_6)
    assert validator.validate_str(sbom.encode(sbom.cyclonedx(bill)).decode()) is None


def test_spdx_document_passes_its_validator(bill: sbom.Bill) -> None:
    document = JsonLikeDictParser().parse(json.loads(sbom.encode(sbom.spdx(bill))))
    assert [message.validation_message for message in validate_full_spdx_document(document)] == []


def test_spdx_document_is_written_as_by_spdx_tools(bill: sbom.Bill) -> None:
    """The validator of spdx-tools accepts spellings that the JSON schema of SPDX 2.3 refuses."""
    document = sbom.spdx(bill)
    written = DocumentConverter().convert(JsonLikeDictParser().parse(document))
    for package in written["packages"]:
        for reference in package.get("externalRefs", []):
            reference["referenceCategory"] = reference["referenceCategory"].replace("_", "-")  # as the schema has it
    assert in_order(written) == in_order(document)


def in_order(document: dict[str, Any]) -> dict[str, Any]:
    relationships = sorted(document["relationships"], key=lambda entry: sorted(entry.items()))
    return {**document, "relationships": relationships}


def test_licence_reference_of_a_wheel_is_explained() -> None:
    expression = "License-Expression: LicenseRef-NVIDIA-Proprietary"
    layers = [*base_layers(), wheel_metadata("nvidia-nccl-cu13", "2.28", expression)]
    document = sbom.spdx(sbom.describe_image(read(layers), LABELS, LOCK, DIGEST))
    assert [entry["licenseId"] for entry in document["hasExtractedLicensingInfos"]] == ["LicenseRef-NVIDIA-Proprietary"]
    parsed = JsonLikeDictParser().parse(document)
    assert [message.validation_message for message in validate_full_spdx_document(parsed)] == []


def test_document_lists_exactly_the_installed_packages(document: dict[str, Any], bill: sbom.Bill) -> None:
    assert sbom.listed_purls(document) == sbom.installed_purls(bill.inventory)
    assert sbom.listed_purls(document) == {
        "pkg:pypi/torch@2.13.0%2Bcpu",
        "pkg:pypi/typing-extensions@4.16.0",
        "pkg:deb/debian/libstdc%2B%2B6@12.2.0-14%2Bdeb12u1?arch=amd64&distro=debian-12",
        "pkg:deb/debian/tini@0.19.0-1?arch=amd64&distro=debian-12",
    }


def test_document_names_lock_base_image_and_hashes(document: dict[str, Any]) -> None:
    text = sbom.encode(document).decode()
    for fact in (LOCK_DIGEST, "debian12 (bootstrap)", "d" * 64, "1" * 64, "2" * 64, "3" * 64, "4" * 64):
        assert fact in text
    assert "5" * 64 not in text, "this is the hash of another version than the installed one"


def test_document_is_the_same_each_time(bill: sbom.Bill) -> None:
    again = sbom.describe_image(read(base_layers()), LABELS, LOCK, DIGEST)
    for make in (sbom.cyclonedx, sbom.spdx):
        assert sbom.encode(make(bill)) == sbom.encode(make(again))


def test_package_urls_are_compared_in_their_canonical_spelling() -> None:
    document = {"bomFormat": "CycloneDX", "components": [{"purl": "pkg:deb/debian/gcc@1%3A2.3?arch=amd64"}]}
    assert sbom.listed_purls(document) == {"pkg:deb/debian/gcc@1:2.3?arch=amd64"}


def test_another_image_has_another_identity(bill: sbom.Bill) -> None:
    other = sbom.describe_image(bill.inventory, LABELS, LOCK, "sha256:" + "e" * 64)
    assert sbom.identity(bill) != sbom.identity(other)
