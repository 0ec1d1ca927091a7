"""The `buildkit` command: results on stdout, talk on stderr, each error once with its hint."""

import logging
import sys
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from buildkit.commands import doctor as doctor_command
from buildkit.commands import export as export_command
from buildkit.commands import plan as plan_commands
from buildkit.commands import publish as publish_commands
from buildkit.commands import run as run_commands
from buildkit.commands.options import (
    AsJson,
    BaseChoice,
    EngineName,
    ImageName,
    Project,
    TargetName,
    VariantName,
    WithDebug,
    emit,
    errors,
    open_matrix,
)
from buildkit.errors import BuildkitError, UsageError
from buildkit.host.settings import read_host
from buildkit.images.build import build_image, cache_folder
from buildkit.images.test import choose_tiers, run_container_tests
from buildkit.recipe.dockerfile import image_labels, image_manifest, render_dockerfile
from buildkit.recipe.lock import read_facts
from buildkit.recipe.matrix import Matrix, Variant
from buildkit.running.engine import open_engine
from buildkit.supply.base import choose_provider
from buildkit.supply.resolve import read_lock, write_lock

app = typer.Typer(
    help="Build, run and test Slipway's container images.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def targets(as_json: AsJson = False, project: Project = None) -> None:
    """List what can be built: targets, variants, their pins and whether they are proven."""
    matrix = open_matrix(project)
    variants = [variant for target in matrix.targets.values() for variant in target.variants.values()]
    if as_json:
        emit([describe(variant) for variant in variants])
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("target", "variant", "status", "pins"):
        table.add_column(column, overflow="fold")
    for variant in variants:
        status = f"{variant.status}, {variant.proof}" if variant.proof else variant.status
        table.add_row(variant.target, variant.name, status, escape(" ".join(variant.requirements)))
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def describe(variant: Variant) -> dict[str, Any]:
    return {
        "target": variant.target,
        "variant": variant.name,
        "status": variant.status,
        "proof": variant.proof,
        "base": variant.base.image,
        "python": variant.base.python,
        "pins": list(variant.requirements),
    }


@app.command()
def render(
    target: TargetName,
    variant: VariantName = None,
    base: BaseChoice = "auto",
    as_json: AsJson = False,
    project: Project = None,
) -> None:
    """Print the complete Dockerfile of a variant. `--base auto` shows the preferred provider and asks no engine."""
    matrix = open_matrix(project)
    chosen = matrix.variant(target, variant)
    provider = chosen.base.providers[0] if base == "auto" else base
    if provider not in chosen.base.providers:
        raise UsageError(
            f"base {chosen.base.name} has no provider `{base}`", f"one of: auto, {', '.join(chosen.base.providers)}"
        )
    locked = lock_or_empty(matrix, chosen)
    labels = image_labels(matrix, chosen, image_manifest(matrix, chosen, provider, locked))
    text = render_dockerfile(matrix, chosen, provider, labels, read_facts(locked))
    if as_json:
        emit({"target": chosen.target, "variant": chosen.name, "base": provider, "dockerfile": text})
    else:
        sys.stdout.write(text)


def lock_or_empty(matrix: Matrix, variant: Variant) -> str:
    """A Dockerfile can be looked at before its variant was ever locked; building it cannot."""
    try:
        return read_lock(matrix, variant)
    except BuildkitError as error:
        errors.print(f"[yellow]warning:[/] {escape(str(error))}")
        return ""


@app.command()
def lock(
    target: TargetName,
    variant: VariantName = None,
    with_debug: WithDebug = False,
    upgrade: Annotated[bool, typer.Option("--upgrade", help="Take the newest that fits, not what was locked.")] = False,
    project: Project = None,
) -> None:
    """Resolve a variant's pins into its lock: every wheel and Debian package with its hash, no address in it."""
    matrix = open_matrix(project)
    path = write_lock(matrix, matrix.variant(target, variant, with_debug), read_host(), cache_folder(), upgrade)
    sys.stdout.write(f"{path.relative_to(matrix.root)}\n")


@app.command()
def build(
    target: TargetName,
    variant: VariantName = None,
    with_debug: WithDebug = False,
    base: BaseChoice = "auto",
    tag: Annotated[list[str] | None, typer.Option("--tag", help="A further tag; may be repeated.")] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Build every layer anew.")] = False,
    progress: Annotated[str, typer.Option(help="auto, plain or tty, as docker's own.")] = "auto",
    engine: EngineName = "auto",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be built, and build nothing.")] = False,
    as_json: AsJson = False,
    project: Project = None,
) -> None:
    """Build and tag the image of a variant."""
    matrix = open_matrix(project)
    chosen = matrix.variant(target, variant, with_debug)
    if dry_run:
        facts = read_facts(read_lock(matrix, chosen))
        provider, reason = choose_provider(chosen.base, base, open_engine(engine), facts)
        emit({**describe(chosen), "provider": provider, "reason": reason})
        return
    result = build_image(matrix, chosen, open_engine(engine), base, tuple(tag or ()), no_cache, progress)
    if as_json:
        emit(asdict(result))
        return
    errors.print(f"built in {result.seconds:.0f} s: {result.size / 1e9:.2f} GB, {result.image_id[:19]}")
    for name in result.tags:
        sys.stdout.write(f"{name}\n")


@app.command("test", context_settings={"allow_interspersed_args": False})
def run_tests(
    target: TargetName,
    variant: VariantName = None,
    with_debug: WithDebug = False,
    image: ImageName = None,
    tier: Annotated[str, typer.Option(help="smoke (one container), cluster (two nodes) or all.")] = "all",
    pytest_arguments: Annotated[list[str] | None, typer.Argument(help="Passed on to pytest, after `--`.")] = None,
    project: Project = None,
) -> None:
    """Run the container tests against a built image; exits with pytest's status."""
    matrix = open_matrix(project)
    chosen = matrix.variant(target, variant, with_debug)
    tiers = choose_tiers(tier)
    engine, name = open_engine("docker"), image or f"slipway:{chosen.identifier}"
    if engine.find(name) is None:
        raise UsageError(
            f"there is no image {name}", f"run `buildkit build --target {chosen.target} --variant {chosen.name}`"
        )
    raise typer.Exit(run_container_tests(matrix.root, chosen.target, name, tiers, tuple(pytest_arguments or ())))


run_commands.register(app)
doctor_command.register(app)
export_command.register(app)
for further in (plan_commands.plan, plan_commands.verify, publish_commands.sbom, publish_commands.publish):
    app.command()(further)


def main() -> None:
    """The console script. A `BuildkitError` becomes `error:` and `hint:` and its exit code; Ctrl-C becomes 130."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("docker").setLevel(logging.WARNING)
    try:
        app()
    except BuildkitError as error:
        errors.print(f"[bold red]error:[/] {escape(str(error))}")
        if error.hint:
            errors.print(f"\n[bold]hint:[/] {escape(error.hint)}")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        errors.print("interrupted")
        sys.exit(130)
