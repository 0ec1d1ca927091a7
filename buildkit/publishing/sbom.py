"""Bills of materials in CycloneDX 1.6 and SPDX 2.3: the same facts in both, the same bytes for the same image.

Formats: https://cyclonedx.org/docs/1.6/json/ and https://spdx.github.io/spdx-spec/v2.3/.
"""

import hashlib
import json
import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from buildkit.publishing.inventory import DebianPackage, InstalledWheel, Inventory
from buildkit.recipe.extension import PLACE
from buildkit.recipe.lock import Lock

MEDIA_TYPES = {"cyclonedx": "application/vnd.cyclonedx+json", "spdx": "application/spdx+json"}
NAMESPACE = "https://slipway.dev/sbom"  # of the documents' identifiers; nothing is served there


@dataclass(frozen=True)
class Bill:
    """The facts in a document.

    `created` is the image's date (RFC 3339, UTC), `digest` that of its OCI manifest, empty if no registry has it.
    `hashes` maps a distribution to the sha256 values that the lock accepts, `debs` the name and version of a Debian
    package to the sha256 of its file.
    """

    title: str
    version: str
    created: str
    digest: str
    inventory: Inventory
    hashes: Mapping[str, tuple[str, ...]]
    debs: Mapping[tuple[str, str], str]


def describe_image(inventory: Inventory, labels: Mapping[str, str], lock: Lock, digest: str = "") -> Bill:
    """The bill of an image. `labels` are its labels; `lock` is the lock that it was built from.

    What a user added comes with the lock inside the image.
    """
    lock = lock.extended_by(inventory.extension)
    return Bill(
        title=labels["org.opencontainers.image.title"],
        version=labels["org.opencontainers.image.version"],
        created=re.sub(r"\+00:00$", "Z", labels["org.opencontainers.image.created"]),
        digest=digest,
        inventory=inventory,
        hashes={pin.name: tuple(sorted(pin.hashes)) for pin in lock.pins},
        debs={(deb.name, deb.version): deb.sha256 for deb in lock.debs},
    )


def encode(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def identity(bill: Bill) -> uuid.UUID:
    """An identifier that depends on every fact of the bill."""
    content = hashlib.sha256(repr(bill).encode())
    return uuid.uuid5(uuid.NAMESPACE_URL, f"{NAMESPACE}/{content.hexdigest()}")


# ---- package URLs (https://github.com/package-url/purl-spec) ---------------------------------------------------------


def wheel_purl(wheel: InstalledWheel) -> str:
    return f"pkg:pypi/{wheel.name}@{quote(wheel.version, safe='')}"


def package_purl(package: DebianPackage, inventory: Inventory) -> str:
    distro = f"{inventory.system}-{inventory.release}"
    name = quote(package.name, safe="")
    return (
        f"pkg:deb/{inventory.system}/{name}@{quote(package.version, safe='~')}"
        f"?arch={package.architecture}&distro={quote(distro)}"
    )


def image_purl(bill: Bill) -> str:
    return f"pkg:oci/slipway@{quote(bill.digest, safe='')}" if bill.digest else f"pkg:generic/slipway@{bill.version}"


# ---- CycloneDX -------------------------------------------------------------------------------------------------------


def cyclonedx(bill: Bill) -> dict[str, Any]:
    inventory = bill.inventory
    image: dict[str, Any] = {
        "type": "container",
        "bom-ref": "image",
        "name": bill.title,
        "version": bill.version,
        "purl": image_purl(bill),
        "properties": [
            {"name": f"dev.slipway.{name}", "value": value} for name, value in lock_and_base(inventory).items()
        ],
    }
    components = [
        {"type": "operating-system", "bom-ref": "base", "name": inventory.system, "version": inventory.release},
        *(cyclonedx_package(package, bill) for package in inventory.packages),
        *(cyclonedx_wheel(wheel, bill.hashes.get(wheel.name, ())) for wheel in inventory.wheels),
        *(cyclonedx_folder(name, digest) for name, digest in inventory.folders.items()),
    ]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{identity(bill)}",
        "version": 1,
        "metadata": {
            "timestamp": bill.created,
            "tools": {"components": [{"type": "application", "name": "buildkit", "group": "slipway"}]},
            "component": image,
        },
        "components": components,
        "dependencies": [{"ref": "image", "dependsOn": sorted(str(part["bom-ref"]) for part in components)}],
    }


def lock_and_base(inventory: Inventory) -> dict[str, str]:
    """The image's lock, base, target and variant, from its own manifest; how its base differs from the lock, and what
    a user added.
    """
    base, extension = inventory.manifest["base"], inventory.manifest.get("extension")
    changes = "; ".join(inventory.base_changes)
    return {
        **({"extension": extension["digest"]} if extension else {}),
        "base": f"{base['name']} ({base['provider']})",
        **({"base.changes": changes} if changes else {}),
        "lock": inventory.manifest["lock"],
        "target": inventory.manifest["target"],
        "variant": inventory.manifest["variant"],
    }


def cyclonedx_package(package: DebianPackage, bill: Bill) -> dict[str, Any]:
    purl = package_purl(package, bill.inventory)
    component = {"type": "library", "bom-ref": purl, "name": package.name, "version": package.version, "purl": purl}
    digest = bill.debs.get((package.name, package.version))
    return {**component, "hashes": [{"alg": "SHA-256", "content": digest}]} if digest else component


def cyclonedx_wheel(wheel: InstalledWheel, hashes: tuple[str, ...]) -> dict[str, Any]:
    purl = wheel_purl(wheel)
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": purl,
        "name": wheel.name,
        "version": wheel.version,
        "purl": purl,
    }
    if wheel.license:
        component["licenses"] = [{"expression": wheel.license}]
    elif wheel.license_name:
        component["licenses"] = [{"license": {"name": wheel.license_name}}]
    checksums = [{"alg": "SHA-256", "content": digest} for digest in hashes]
    if len(checksums) == 1:
        component["hashes"] = checksums
    elif checksums:  # the lock accepts several files; one of them is installed
        component["externalReferences"] = [{"type": "distribution", "url": purl, "hashes": checksums}]
    return component


def cyclonedx_folder(name: str, digest: str) -> dict[str, Any]:
    """A folder of a user's code; its hash is over the names and contents of the files."""
    hashes = [{"alg": "SHA-256", "content": digest.removeprefix("sha256:")}]
    return {"type": "application", "bom-ref": f"folder:{name}", "name": f"{PLACE}/{name}", "hashes": hashes}


# ---- SPDX ------------------------------------------------------------------------------------------------------------


def spdx(bill: Bill) -> dict[str, Any]:
    inventory, unique = bill.inventory, identity(bill)
    licenses = extracted_licenses(inventory.wheels)
    image = {
        **spdx_package("image", bill.title, bill.version, image_purl(bill), "CONTAINER"),
        "comment": "; ".join(f"{name}: {value}" for name, value in lock_and_base(inventory).items()),
    }
    base = spdx_package("base", inventory.system, inventory.release, "", "OPERATING_SYSTEM")
    parts = [
        base,
        *(spdx_deb(package, bill) for package in inventory.packages),
        *(spdx_wheel(wheel, bill.hashes.get(wheel.name, ())) for wheel in inventory.wheels),
        *(spdx_folder(name, digest) for name, digest in inventory.folders.items()),
    ]
    return {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": bill.title,
        "documentNamespace": f"{NAMESPACE}/{unique}",
        "creationInfo": {"created": bill.created, "creators": ["Tool: slipway-buildkit"]},
        "packages": [image, *parts],
        **({"hasExtractedLicensingInfos": licenses} if licenses else {}),
        "relationships": [
            relationship("SPDXRef-DOCUMENT", "DESCRIBES", "SPDXRef-image"),
            *(relationship("SPDXRef-image", "CONTAINS", str(part["SPDXID"])) for part in parts),
        ],
    }


def extracted_licenses(wheels: Iterable[InstalledWheel]) -> list[dict[str, str]]:
    """Licences that wheels name by a LicenseRef (SPDX 2.3, clause 10); their text is in the wheel."""
    names = sorted({name for wheel in wheels for name in re.findall(r"LicenseRef-[A-Za-z0-9.-]+", wheel.license)})
    return [
        {"licenseId": name, "name": name, "extractedText": "See the licence files inside the wheel."} for name in names
    ]


def relationship(subject: str, kind: str, other: str) -> dict[str, str]:
    return {"spdxElementId": subject, "relationshipType": kind, "relatedSpdxElement": other}


def spdx_package(identifier: str, name: str, version: str, purl: str, purpose: str) -> dict[str, Any]:
    package: dict[str, Any] = {
        "SPDXID": f"SPDXRef-{re.sub(r'[^A-Za-z0-9.-]', '-', identifier)}",
        "name": name,
        "versionInfo": version,
        "downloadLocation": "NOASSERTION",
        "filesAnalyzed": False,
        "licenseConcluded": "NOASSERTION",
        "licenseDeclared": "NOASSERTION",
        "copyrightText": "NOASSERTION",
        "primaryPackagePurpose": purpose,
    }
    if purl:
        package["externalRefs"] = [
            {"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": purl}
        ]
    return package


def spdx_deb(package: DebianPackage, bill: Bill) -> dict[str, Any]:
    # `+` and `_` both become `-` in an identifier: a hash of the full name keeps identifiers unique.
    unique = hashlib.sha256(f"{package.name}:{package.architecture}".encode()).hexdigest()[:8]
    purl = package_purl(package, bill.inventory)
    digest = bill.debs.get((package.name, package.version))
    return {
        **({"checksums": [{"algorithm": "SHA256", "checksumValue": digest}]} if digest else {}),
        **spdx_package(f"deb-{package.name}-{unique}", package.name, package.version, purl, "LIBRARY"),
        "sourceInfo": f"built from: {package.source} {package.source_version}",
    }


def spdx_wheel(wheel: InstalledWheel, hashes: tuple[str, ...]) -> dict[str, Any]:
    package = spdx_package(f"wheel-{wheel.name}", wheel.name, wheel.version, wheel_purl(wheel), "LIBRARY")
    if wheel.license:
        package["licenseDeclared"] = wheel.license
    elif wheel.license_name:
        package["licenseComments"] = f"the wheel says: {wheel.license_name}"
    if len(hashes) == 1:
        package["checksums"] = [{"algorithm": "SHA256", "checksumValue": hashes[0]}]
    elif hashes:
        package["sourceInfo"] = f"the lock accepts one of: {', '.join(f'sha256:{digest}' for digest in hashes)}"
    return package


def spdx_folder(name: str, digest: str) -> dict[str, Any]:
    return {
        **spdx_package(f"folder-{name}", f"{PLACE}/{name}", "", "", "APPLICATION"),
        "checksums": [{"algorithm": "SHA256", "checksumValue": digest.removeprefix("sha256:")}],
    }


# ---- reading back ----------------------------------------------------------------------------------------------------


def listed_purls(document: Mapping[str, Any]) -> set[str]:
    """The package URLs that a document lists as part of the image, in either format."""
    if "bomFormat" in document:
        return {part["purl"] for part in document["components"] if "purl" in part}
    return {
        reference["referenceLocator"]
        for package in document["packages"]
        if package["SPDXID"] != "SPDXRef-image"
        for reference in package.get("externalRefs", [])
    }


def installed_purls(inventory: Inventory) -> set[str]:
    """The package URLs of the wheels and Debian packages in the image."""
    return {
        *(wheel_purl(wheel) for wheel in inventory.wheels),
        *(package_purl(package, inventory) for package in inventory.packages),
    }
