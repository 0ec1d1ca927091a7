"""A certificate: the parts of an image that were tried on a machine, as an in-toto statement.

https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from buildkit.errors import TrustError
from buildkit.publishing.provenance import STATEMENT

PREDICATE = "https://slipway.dev/certificate/v1"
PASSED, FAILED, NOT_DONE = "passed", "failed", "not done"
RESULTS = (PASSED, FAILED, NOT_DONE)


@dataclass(frozen=True)
class Part:
    """One part of a certificate. `reason` says why it failed or was not done; figures carry their unit in the name."""

    name: str
    result: str
    reason: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Hardware:
    """The machine. `device` is the GPU's name, or `CPU`; `driver` is empty where the host does not tell it."""

    device: str
    count: int
    driver: str
    cpus: int
    memory_gib: int

    def __str__(self) -> str:
        driver = f", driver {self.driver}" if self.driver else ""
        return f"{self.count} x {self.device}{driver}"


@dataclass(frozen=True)
class Certificate:
    """`digests` are the image's, local and in registries, `lock` is `sha256:…`, `date` RFC 3339.

    A `rehearsal` used no GPU.
    """

    image: str
    digests: tuple[str, ...]
    target: str
    variant: str
    lock: str
    revision: str
    version: str
    date: str
    seconds: float
    rehearsal: bool
    hardware: Hardware
    parts: tuple[Part, ...]

    def with_result(self, result: str) -> tuple[Part, ...]:
        return tuple(part for part in self.parts if part.result == result)

    @property
    def identifier(self) -> str:
        return f"{self.target}-{self.variant}"

    @property
    def file_name(self) -> str:
        chip = re.sub(r"[^a-z0-9]+", "-", self.hardware.device.lower()).strip("-")
        return f"{self.identifier}-{chip}-x{self.hardware.count}.json"


def statement(certificate: Certificate) -> dict[str, Any]:
    """The in-toto statement. Its subject is the image, by every digest."""
    predicate = asdict(certificate)
    name, digests = predicate.pop("image"), predicate.pop("digests")
    subject = [{"name": name, "digest": {"sha256": digest.removeprefix("sha256:")}} for digest in digests]
    return {"_type": STATEMENT, "subject": subject, "predicateType": PREDICATE, "predicate": predicate}


def read_statement(content: bytes) -> Certificate:
    """The certificate in a statement. Raises `TrustError` if a field is missing, unknown or has the wrong type."""
    try:
        document = json.loads(content)
        if (kinds := (document["_type"], document["predicateType"])) != (STATEMENT, PREDICATE):
            raise TrustError(f"this statement has another type: {kinds}", "write it with `buildkit certify`")
        subjects, fields = document["subject"], dict(document["predicate"])
        fields["hardware"] = Hardware(**fields["hardware"])
        fields["parts"] = tuple(Part(**part) for part in fields["parts"])
        digests = tuple(f"sha256:{subject['digest']['sha256']}" for subject in subjects)
        certificate = Certificate(image=subjects[0]["name"], digests=digests, **fields)
        check_types(certificate)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError) as error:
        raise TrustError(f"this is no certificate: {error!r}", "write it with `buildkit certify`") from error
    return certificate


def check_types(certificate: Certificate) -> None:
    """Raises `TypeError` or `ValueError` for values that no certificate has."""
    records: tuple[Certificate | Hardware | Part, ...] = (certificate, certificate.hardware, *certificate.parts)
    for record in records:
        for known in fields(record):
            check_type(known.name, getattr(record, known.name), known.type)
    for part in certificate.parts:
        for name, figure in part.figures.items():
            check_type(name, figure, float)
    if not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", certificate.date, re.ASCII):
        raise ValueError(f"date is {certificate.date!r}")
    if not certificate.parts or any(part.result not in RESULTS for part in certificate.parts):
        raise ValueError(f"every part is one of: {', '.join(RESULTS)}")


def check_type(name: str, value: object, kind: object) -> None:
    """Checks texts, numbers and yes or no; `read_statement` makes the other kinds of fields."""
    right = {
        str: isinstance(value, str),
        bool: isinstance(value, bool),
        int: isinstance(value, int) and not isinstance(value, bool),
        float: isinstance(value, int | float) and not isinstance(value, bool),
    }
    if isinstance(kind, type) and not right.get(kind, True):
        raise TypeError(f"{name} is {value!r}")
