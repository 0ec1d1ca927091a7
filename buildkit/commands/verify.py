"""The command `verify`: builds an image twice and compares it, or checks one in a registry."""

import sys
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.markup import escape

from buildkit.commands.arguments import command
from buildkit.commands.options import AsJson, BaseChoice, Project, RegistryCa, VariantName, emit, errors, open_matrix
from buildkit.errors import PlanError, TrustError, UsageError, printable
from buildkit.images.reproduce import verify_image
from buildkit.publishing.check import VerificationReport, check_published
from buildkit.publishing.rebuild import check_rebuild
from buildkit.registry.client import Registry
from buildkit.registry.credentials import read_credentials
from buildkit.registry.reference import Reference, parse_reference
from buildkit.registry.signature import Trust
from buildkit.running.engine import Docker, open_engine
from buildkit.supply.base import shown


@dataclass(frozen=True, kw_only=True)
class VerifyArguments:
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            "-t",
            help="Build this target's image twice and compare the bytes. Published: what the image must be. "
            "Default: what its tag says.",
        ),
    ] = None
    variant: VariantName = None
    base: BaseChoice = "auto"
    project: Project = None
    published: Annotated[
        str | None,
        typer.Option(help="Check a published image: HOST[:PORT]/REPOSITORY with :TAG or @DIGEST.", metavar="REF"),
    ] = None
    key: Annotated[
        str | None, typer.Option(help="The publisher's public key: a file, or any key reference of cosign's.")
    ] = None
    certificate_identity: Annotated[str | None, typer.Option(help="Keyless: the identity that must have signed.")] = (
        None
    )
    certificate_oidc_issuer: Annotated[str | None, typer.Option(help="Keyless: the issuer of that identity.")] = None
    registry_ca: RegistryCa = None
    quick: Annotated[
        bool, typer.Option("--quick", help="Published: check that the layers exist without downloading them.")
    ] = False
    newer_than: Annotated[
        datetime | None,
        typer.Option(
            formats=["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S"],
            help="Published: refuse an image whose commit is older (UTC): an old one under a new tag is signed, too.",
        ),
    ] = None
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Published: build its commit here without cache, and compare the bytes.")
    ] = False
    as_json: AsJson = False


@command
def verify(arguments: VerifyArguments) -> None:
    """Verify an image: `--target` builds it twice and compares the bytes, `--published` checks one in a registry."""
    if not (arguments.target or arguments.published):
        raise UsageError("verify needs --target or --published", "for example `buildkit verify --target cpu`")
    if arguments.variant and not arguments.target:
        raise UsageError("--variant needs --target", f"for example --target cpu --variant {arguments.variant}")
    if arguments.published:
        verify_published(arguments, arguments.published)
    elif arguments.newer_than or arguments.rebuild:
        raise UsageError(
            "--newer-than and --rebuild need --published", "without it, --target builds twice and compares"
        )
    else:
        verify_two_builds(arguments, arguments.target or "")


def verify_two_builds(arguments: VerifyArguments, target: str) -> None:
    matrix = open_matrix(arguments.project)
    chosen = matrix.variant(target, arguments.variant)
    report = verify_image(matrix, chosen, open_engine("docker"), arguments.base)
    if report.base_changes:
        errors.print(f"[yellow]warning:[/] the base is not the locked one: {escape(shown(report.base_changes))}")
    if arguments.as_json:
        emit(asdict(report))
    elif not report.difference:
        errors.print(f"two builds without cache gave the same bytes ({report.seconds:.0f} s)")
        sys.stdout.write(f"{report.digests[0]}\n")
    if report.difference:
        where = f"first in {report.difference.file} of layer {report.difference.layer}"
        raise PlanError(f"two builds of {chosen.identifier} differ: {where}", report.difference.hint)


def verify_published(arguments: VerifyArguments, published: str) -> None:
    """Checks an image from outside: content, signature, bills of materials, provenance, lock.

    If all of it holds, `--rebuild` builds it again from a checkout.
    """
    source = open_matrix(arguments.project).root if arguments.rebuild else None
    trust = Trust(arguments.key or "", arguments.certificate_identity or "", arguments.certificate_oidc_issuer or "")
    reference = parse_reference(published)
    if not (reference.tag or reference.digest):
        raise UsageError(
            f"{published} names no tag or digest", f"write {reference.name}:TAG or {reference.name}@sha256:…"
        )
    registry = Registry(reference, read_credentials(reference.host), arguments.registry_ca)
    report = check_published(
        registry,
        reference.digest or reference.tag,
        trust,
        arguments.registry_ca,
        quick=arguments.quick,
        newer_than=arguments.newer_than.replace(tzinfo=UTC) if arguments.newer_than else None,
        published_as="-".join(name for name in (arguments.target, arguments.variant) if name),
    )
    if source and report.passed:
        rebuilt = check_rebuild(registry, report.digest, source, Docker())
        report = replace(report, checks=(*report.checks, rebuilt))
    if arguments.as_json:
        emit({**asdict(report), "passed": report.passed})
    else:
        show(report, reference)
    if not report.passed:
        failed = ", ".join(check.name for check in report.checks if not check.passed)
        raise TrustError(f"{reference} does not pass: {failed}", "do not use this image; see above what was found")


def show(report: VerificationReport, reference: Reference) -> None:
    for check in report.checks:
        mark = "[green]ok[/]  " if check.passed else "[bold red]FAIL[/]"
        errors.print(f"{mark} {check.name:15} {escape(printable(check.detail))}")
    if report.passed:
        sys.stdout.write(f"{reference.name}@{report.digest}\n")
