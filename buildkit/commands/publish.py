"""The commands around publishing: `sbom`, `publish` and `verify --published`."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from buildkit.commands.options import (
    AsJson,
    BaseChoice,
    ImageName,
    Project,
    TargetName,
    VariantName,
    emit,
    errors,
    open_matrix,
)
from buildkit.errors import TrustError, UsageError
from buildkit.publishing import sbom as bills
from buildkit.publishing.check import ATTACHMENTS, Report, check_published
from buildkit.publishing.inventory import read_local
from buildkit.publishing.release import Request, check_access, publish_image, tags_for
from buildkit.publishing.signature import Signer, Trust
from buildkit.registry.client import Registry
from buildkit.registry.credentials import read_credentials
from buildkit.registry.reference import Reference, parse_reference
from buildkit.running.engine import Docker
from buildkit.supply.resolve import read_lock

RegistryCa = Annotated[
    Path | None,
    typer.Option(
        "--registry-ca",
        envvar="SLIPWAY_REGISTRY_CA",
        exists=True,
        dir_okay=False,
        help="PEM file with the registry's authority; docker's own for it, or the system's, when not given.",
    ),
]
FORMATS = {"cyclonedx": bills.cyclonedx, "spdx": bills.spdx}


def sbom(
    target: TargetName,
    variant: VariantName = None,
    image: ImageName = None,
    kind: Annotated[str, typer.Option("--format", help="cyclonedx or spdx, as JSON.")] = "cyclonedx",
    project: Project = None,
) -> None:
    """Print the bill of materials of a built image: its wheels, Debian packages and base."""
    if kind not in FORMATS:
        raise UsageError(f"there is no format `{kind}`", f"one of: {', '.join(FORMATS)}")
    matrix = open_matrix(project)
    chosen = matrix.variant(target, variant)
    engine, name = Docker(), image or f"slipway:{chosen.identifier}"
    found = engine.find(name)
    if found is None:
        raise UsageError(f"there is no image {name}", f"run `buildkit build --target {chosen.target}`")
    bill = bills.describe_image(read_local(engine.binary, name), found.labels, read_lock(matrix, chosen))
    sys.stdout.buffer.write(bills.encode(FORMATS[kind](bill)))


def publish(
    target: TargetName,
    registry: Annotated[
        str, typer.Option(envvar="SLIPWAY_REGISTRY", help="HOST[:PORT]/REPOSITORY; http:// before it for a plain one.")
    ],
    variant: VariantName = None,
    key: Annotated[
        str | None,
        typer.Option(envvar="SLIPWAY_SIGN_KEY", help="cosign's key: a file, or env://, awskms:// and so on."),
    ] = None,
    keyless: Annotated[
        bool, typer.Option("--keyless", envvar="SLIPWAY_SIGN_KEYLESS", help="Sign as this CI job, in Sigstore's log.")
    ] = False,
    registry_ca: RegistryCa = None,
    base: BaseChoice = "auto",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and ask nobody.")] = False,
    as_json: AsJson = False,
    project: Project = None,
    pytest_arguments: Annotated[
        list[str] | None, typer.Argument(help="Passed on to pytest for the smoke tests, after `--`.")
    ] = None,
) -> None:
    """Build, test, push, pull back and test, attach, sign, check and promote an image; run again to finish."""
    if bool(key) == keyless:
        raise UsageError(
            "it is not said how to sign" if not key else "a key and keyless exclude each other",
            "name --key cosign.key (`cosign generate-key-pair` makes one), or --keyless in a CI job",
        )
    repository = parse_reference(registry)
    if repository.tag or repository.digest:
        raise UsageError(f"--registry {registry} names a tag", f"tags are made here: write {repository.name}")
    matrix = open_matrix(project)
    request = Request(
        matrix,
        matrix.variant(target, variant),
        repository,
        Signer(key or ""),
        registry_ca,
        base,
        tuple(pytest_arguments or ()),
    )
    if dry_run:
        emit(plan(request))
        return
    check_access(request)
    publication = publish_image(request, Docker())
    if as_json:
        emit(asdict(publication))
        return
    errors.print(f"published in {publication.seconds:.0f} s: {publication.repository}@{publication.digest}")
    for tag in publication.tags:
        sys.stdout.write(f"{publication.repository}:{tag}\n")


def plan(request: Request) -> dict[str, Any]:
    """What `publish` would do. The digest in the tags is that of the image, which exists only once it is built."""
    tags = tags_for(request, "IMAGE")
    return {
        "target": request.variant.target,
        "variant": request.variant.name,
        "status": request.variant.status,
        "repository": request.repository.name,
        "staging": tags.staging,
        "tags": list(tags.promoted),
        "attachments": {kind: media_type for kind, (media_type, _) in ATTACHMENTS.items()},
        "sign": request.signer.arguments(),
    }


def verify_published(published: str, trust: Trust, registry_ca: Path | None, quick: bool, as_json: bool) -> None:
    """Checks a published image from outside: content, signature, bills of materials, provenance, lock."""
    reference = parse_reference(published)
    if not (reference.tag or reference.digest):
        raise UsageError(
            f"{published} names no tag or digest", f"write {reference.name}:TAG or {reference.name}@sha256:…"
        )
    registry = Registry(reference, read_credentials(reference.host), registry_ca)
    report = check_published(registry, reference.digest or reference.tag, trust, registry_ca, quick)
    if as_json:
        emit({**asdict(report), "passed": report.passed})
    else:
        show(report, reference)
    if not report.passed:
        failed = ", ".join(check.name for check in report.checks if not check.passed)
        raise TrustError(f"{reference} does not pass: {failed}", "do not use this image; see above what was found")


def show(report: Report, reference: Reference) -> None:
    for check in report.checks:
        mark = "[green]ok[/]  " if check.passed else "[bold red]FAIL[/]"
        errors.print(f"{mark} {check.name:15} {escape(check.detail)}")
    if report.passed:
        sys.stdout.write(f"{reference.name}@{report.digest}\n")
