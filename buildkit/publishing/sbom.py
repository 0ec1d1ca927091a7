"""Bills of materials in CycloneDX 1.6 and SPDX 2.3: the same facts in both, the same bytes for the same image.

Formats: https://cyclonedx.org/docs/1.6/json/ and https://spdx.github.io/spdx-spec/v2.3/.
"""

import hashlib
import json
import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from cyclonedx.model import ExternalReference, ExternalReferenceType, HashAlgorithm, HashType, Property, XsUri
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import DisjunctiveLicense, LicenseExpression
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

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


def wheel_purl(wheel: InstalledWheel) -> PackageURL:
    return PackageURL("pypi", None, wheel.name, wheel.version)


def package_purl(package: DebianPackage, inventory: Inventory) -> PackageURL:
    qualifiers = {"arch": package.architecture, "distro": f"{inventory.system}-{inventory.release}"}
    return PackageURL("deb", inventory.system, package.name, package.version, qualifiers)


def image_purl(bill: Bill) -> PackageURL:
    kind, version = ("oci", bill.digest) if bill.digest else ("generic", bill.version)
    return PackageURL(kind, None, "slipway", version)


# ---- CycloneDX -------------------------------------------------------------------------------------------------------


def cyclonedx(bill: Bill) -> dict[str, Any]:
    inventory = bill.inventory
    image = Component(
        type=ComponentType.CONTAINER,
        bom_ref="image",
        name=bill.title,
        version=bill.version,
        purl=image_purl(bill),
        properties=[
            Property(name=f"dev.slipway.{name}", value=value) for name, value in lock_and_base(inventory).items()
        ],
    )
    tool = Component(type=ComponentType.APPLICATION, bom_ref="buildkit", group="slipway", name="buildkit")
    bom = Bom(
        serial_number=identity(bill),
        metadata=BomMetaData(timestamp=datetime.fromisoformat(bill.created), component=image),
        components=[
            Component(
                type=ComponentType.OPERATING_SYSTEM, bom_ref="base", name=inventory.system, version=inventory.release
            ),
            *(cyclonedx_package(package, bill) for package in inventory.packages),
            *(cyclonedx_wheel(wheel, bill.hashes.get(wheel.name, ())) for wheel in inventory.wheels),
            *(cyclonedx_folder(name, digest) for name, digest in inventory.folders.items()),
        ],
    )
    bom.metadata.tools.components.add(tool)
    bom.register_dependency(image, bom.components)
    document: dict[str, Any] = json.loads(JsonV1Dot6(bom).output_as_string())
    return document


def sha256(digest: str) -> HashType:
    return HashType(alg=HashAlgorithm.SHA_256, content=digest)


def cyclonedx_package(package: DebianPackage, bill: Bill) -> Component:
    purl = package_purl(package, bill.inventory)
    digest = bill.debs.get((package.name, package.version))
    return Component(
        bom_ref=str(purl),
        name=package.name,
        version=package.version,
        purl=purl,
        hashes=[sha256(digest)] if digest else [],
    )


def cyclonedx_wheel(wheel: InstalledWheel, hashes: tuple[str, ...]) -> Component:
    purl = wheel_purl(wheel)
    component = Component(bom_ref=str(purl), name=wheel.name, version=wheel.version, purl=purl)
    if wheel.license:
        component.licenses.add(LicenseExpression(wheel.license))
    elif wheel.license_name:
        component.licenses.add(DisjunctiveLicense(name=wheel.license_name))
    checksums = [sha256(digest) for digest in hashes]
    if len(checksums) == 1:
        component.hashes.update(checksums)
    elif checksums:  # the lock accepts several files; one of them is installed
        component.external_references.add(
            ExternalReference(type=ExternalReferenceType.DISTRIBUTION, url=XsUri(str(purl)), hashes=checksums)
        )
    return component


def cyclonedx_folder(name: str, digest: str) -> Component:
    """A folder of a user's code; its hash is over the names and contents of the files."""
    return Component(
        type=ComponentType.APPLICATION,
        bom_ref=f"folder:{name}",
        name=f"{PLACE}/{name}",
        hashes=[sha256(digest.removeprefix("sha256:"))],
    )


# ---- SPDX ------------------------------------------------------------------------------------------------------------


def spdx(bill: Bill) -> dict[str, Any]:
    inventory, unique = bill.inventory, identity(bill)
    licenses = extracted_licenses(inventory.wheels)
    image = {
        **spdx_package("image", bill.title, bill.version, image_purl(bill), "CONTAINER"),
        "comment": "; ".join(f"{name}: {value}" for name, value in lock_and_base(inventory).items()),
    }
    base = spdx_package("base", inventory.system, inventory.release, None, "OPERATING_SYSTEM")
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


def spdx_package(identifier: str, name: str, version: str, purl: PackageURL | None, purpose: str) -> dict[str, Any]:
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
            {"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": str(purl)}
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
        **spdx_package(f"folder-{name}", f"{PLACE}/{name}", "", None, "APPLICATION"),
        "checksums": [{"algorithm": "SHA256", "checksumValue": digest.removeprefix("sha256:")}],
    }


# ---- reading back ----------------------------------------------------------------------------------------------------


def listed_purls(document: Mapping[str, Any]) -> set[str]:
    """The package URLs that a document lists as part of the image, in either format, in their canonical spelling."""
    if "bomFormat" in document:
        texts = [part["purl"] for part in document["components"] if "purl" in part]
    else:
        texts = [
            reference["referenceLocator"]
            for package in document["packages"]
            if package["SPDXID"] != "SPDXRef-image"
            for reference in package.get("externalRefs", [])
        ]
    return {str(PackageURL.from_string(text)) for text in texts}


def installed_purls(inventory: Inventory) -> set[str]:
    """The package URLs of the wheels and Debian packages in the image."""
    wheels = map(wheel_purl, inventory.wheels)
    return {str(purl) for purl in (*wheels, *(package_purl(package, inventory) for package in inventory.packages))}
