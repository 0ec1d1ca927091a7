"""The commands that look at a build: `plan` before it, `verify` after it."""

import sys
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from buildkit.commands import publish as publish_commands
from buildkit.commands.options import (
    AsJson,
    BaseChoice,
    Project,
    TargetName,
    VariantName,
    WithDebug,
    emit,
    errors,
    open_matrix,
)
from buildkit.errors import PlanError, UsageError
from buildkit.images.build import cache_folder
from buildkit.images.plan import Plan, make_plan
from buildkit.images.reproduce import Difference, verify_image
from buildkit.publishing.signature import Trust
from buildkit.running.engine import open_engine
from buildkit.supply.resolve import read_lock

MARKS = {"ok": "[green]ok[/]", "warn": "[yellow]warn[/]", "fail": "[bold red]FAIL[/]"}


def plan(
    target: TargetName,
    variant: VariantName = None,
    with_debug: WithDebug = False,
    as_json: AsJson = False,
    project: Project = None,
) -> None:
    """Show the layers of a build with their predicted sizes, what is new in them, and whether the pins fit together."""
    matrix = open_matrix(project)
    chosen = matrix.variant(target, variant, with_debug)
    planned = make_plan(matrix, chosen, read_lock(matrix, chosen), cache_folder())
    if as_json:
        emit(describe(planned))
    else:
        show(planned)
    failed = [check.name for check in planned.checks if check.status == "fail"]
    if failed:
        raise PlanError(
            f"{chosen.identifier} does not fit together: {', '.join(failed)}",
            "change the pins in images/matrix.toml, then run `buildkit lock`",
        )


def describe(planned: Plan) -> dict[str, Any]:
    return {
        "target": planned.target,
        "variant": planned.variant,
        "layers": [asdict(layer) for layer in planned.layers],
        "total_bytes": planned.total_bytes,
        "changed": list(planned.changed),
        "checks": [asdict(check) for check in planned.checks],
    }


def show(planned: Plan) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120)
    table = Table("layer", "MB", "key", "", box=None, pad_edge=False, header_style="bold")
    table.columns[1].justify = "right"
    for layer in planned.layers:
        table.add_row(
            layer.name, f"{layer.bytes / 1e6:,.0f}", layer.key, "new" if layer.name in planned.changed else ""
        )
    table.add_row("total", f"{planned.total_bytes / 1e6:,.0f}", style="bold")
    console.print(table)
    console.print()
    checks = Table(box=None, pad_edge=False, show_header=False)
    for check in planned.checks:
        checks.add_row(MARKS[check.status], check.name, escape(check.detail))
    console.print(checks)


def verify(
    target: Annotated[
        str | None, typer.Option("--target", "-t", help="Build twice and compare: cpu, cuda or rocm.")
    ] = None,
    variant: VariantName = None,
    base: BaseChoice = "auto",
    project: Project = None,
    published: Annotated[
        str | None,
        typer.Option(help="Check what a registry holds: HOST[:PORT]/REPOSITORY with :TAG or @DIGEST.", metavar="REF"),
    ] = None,
    key: Annotated[str | None, typer.Option(help="The publisher's public key, a file or what cosign takes.")] = None,
    certificate_identity: Annotated[str | None, typer.Option(help="Keyless: who must have signed.")] = None,
    certificate_oidc_issuer: Annotated[str | None, typer.Option(help="Keyless: who vouches for that identity.")] = None,
    registry_ca: publish_commands.RegistryCa = None,
    quick: Annotated[bool, typer.Option("--quick", help="Published: only see that the layers are there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Prove an image: `--target` builds it twice and compares the bytes, `--published` checks one in a registry."""
    if bool(target) == bool(published):
        raise UsageError("verify needs either --target or --published", "`buildkit verify --target cpu`, for instance")
    if published:
        trust = Trust(key or "", certificate_identity or "", certificate_oidc_issuer or "")
        publish_commands.verify_published(published, trust, registry_ca, quick, as_json)
        return
    matrix = open_matrix(project)
    chosen = matrix.variant(target or "", variant)
    report = verify_image(matrix, chosen, open_engine("docker"), base)
    if as_json:
        emit(asdict(report))
    elif not report.difference:
        errors.print(f"two builds without cache gave the same bytes ({report.seconds:.0f} s)")
        sys.stdout.write(f"{report.digests[0]}\n")
    if report.difference:
        raise PlanError(
            f"two builds of {chosen.identifier} differ: {explain(report.difference)}", report.difference.hint
        )


def explain(difference: Difference) -> str:
    return f"first in {difference.file} of layer {difference.layer}"
