"""The bills of materials match what the running image reports as installed."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from docker.models.images import Image
from packaging.utils import canonicalize_name
from testinfra.host import Host

from buildkit.publishing import sbom
from buildkit.publishing.inventory import read_local
from buildkit.recipe.lock_file import read_lock
from buildkit.recipe.matrix import load_matrix
from tests.smoke.conftest import INSTALLED

PYTHON = "/opt/slipway/venv/bin/python"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def bill(image: Image, manifest: dict[str, Any]) -> sbom.Bill:
    """The SBOM made from the image's files."""
    matrix = load_matrix(ROOT)
    lock = read_lock(matrix, matrix.variant(manifest["target"], manifest["variant"]))
    return sbom.describe_image(read_local(shutil.which("docker") or "docker", str(image.id)), image.labels, lock)


@pytest.fixture(scope="module")
def components(bill: sbom.Bill) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = sbom.cyclonedx(bill)["components"]
    return parts


def test_the_wheels_match_what_python_finds(host: Host, components: list[dict[str, Any]]) -> None:
    installed = json.loads(host.check_output(f'{PYTHON} -c "{INSTALLED}"'))
    listed = {part["name"]: part["version"] for part in components if part.get("purl", "").startswith("pkg:pypi/")}
    assert listed == {canonicalize_name(name): version for name, version in installed.items()}


def test_the_packages_match_dpkg(host: Host, components: list[dict[str, Any]]) -> None:
    lines = host.check_output(r"dpkg-query -W -f '${db:Status-Status} ${Package} ${Version}\n'").splitlines()
    installed = [tuple(line.split()[1:]) for line in lines if line.startswith("installed ")]
    listed = [(part["name"], part["version"]) for part in components if part.get("purl", "").startswith("pkg:deb/")]
    assert sorted(listed) == sorted(installed)


def test_base_is_what_the_image_says(host: Host, components: list[dict[str, Any]]) -> None:
    base = next(part for part in components if part["type"] == "operating-system")
    assert (
        host.check_output(". /etc/os-release; echo $ID ${VERSION_ID:-$VERSION_CODENAME}")
        == f"{base['name']} {base['version']}"
    )


def test_every_wheel_has_a_hash_of_the_lock(components: list[dict[str, Any]]) -> None:
    wheels = [part for part in components if part.get("purl", "").startswith("pkg:pypi/")]
    bare = [part["name"] for part in wheels if "hashes" not in part and "externalReferences" not in part]
    assert bare == []


def test_every_package_of_a_bootstrapped_base_has_the_hash_of_the_lock(
    manifest: dict[str, Any], components: list[dict[str, Any]]
) -> None:
    if manifest["base"]["provider"] != "bootstrap":
        pytest.skip(f"the base came from its {manifest['base']['provider']}, not from the lock's packages")
    packages = [part for part in components if part.get("purl", "").startswith("pkg:deb/")]
    assert [part["name"] for part in packages if "hashes" not in part] == []


def test_documents_are_valid(bill: sbom.Bill) -> None:
    reason = "the validators come with `pip install slipway-rl[dev]`"
    schema = pytest.importorskip("cyclonedx.schema", reason=reason)
    validation = pytest.importorskip("cyclonedx.validation", reason=reason)
    parser = pytest.importorskip("spdx_tools.spdx.parser.jsonlikedict.json_like_dict_parser", reason=reason)
    spdx = pytest.importorskip("spdx_tools.spdx.validation.document_validator", reason=reason)
    validator = validation.make_schemabased_validator(schema.OutputFormat.JSON, schema.SchemaVersion.V1_6)
    assert validator.validate_str(sbom.encode(sbom.cyclonedx(bill)).decode()) is None
    document = parser.JsonLikeDictParser().parse(json.loads(sbom.encode(sbom.spdx(bill))))
    assert [message.validation_message for message in spdx.validate_full_spdx_document(document)] == []
