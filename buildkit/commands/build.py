"""The command `build`."""

import sys
from dataclasses import asdict
from typing import Annotated

import typer
from rich.markup import escape

from buildkit.commands.options import (
    Apt,
    AsJson,
    BaseChoice,
    Copy,
    EngineName,
    PlatformName,
    Project,
    RegistryCa,
    TargetName,
    VariantName,
    WarmCacheSource,
    WarmKey,
    With,
    WithDebug,
    emit,
    errors,
    open_matrix,
)
from buildkit.commands.targets import describe
from buildkit.errors import UsageError
from buildkit.host.settings import read_host
from buildkit.images.build import build_image, cache_folder
from buildkit.images.parent import find_parent
from buildkit.recipe.extension import read_extension
from buildkit.recipe.lock_file import read_lock
from buildkit.recipe.platform import choose_platform, host_platform
from buildkit.running.engine import names_registry, open_engine
from buildkit.supply.base import choose_provider, shown
from buildkit.supply.resolve import lock_for_build
from buildkit.warming.source import Source


def build(
    target: TargetName,
    variant: VariantName = None,
    with_debug: WithDebug = False,
    platform: PlatformName = None,
    base: BaseChoice = "auto",
    requirements: With = None,
    apt: Apt = None,
    copy: Copy = None,
    extended: Annotated[
        str | None,
        typer.Option(
            "--from", help="Add to this image, here or in a registry, instead of building its layers.", metavar="IMAGE"
        ),
    ] = None,
    tag: Annotated[list[str] | None, typer.Option("--tag", help="Additional tag. Repeatable.")] = None,
    push: Annotated[
        bool,
        typer.Option(
            "--push",
            help="Push each --tag to its registry, as docker does. `publish` also tests, describes and signs.",
        ),
    ] = False,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Rebuild every layer.")] = False,
    progress: Annotated[str, typer.Option(help="Progress output, as in docker: auto, plain or tty.")] = "auto",
    warm: WarmCacheSource = None,
    warm_key: WarmKey = None,
    registry_ca: RegistryCa = None,
    engine: EngineName = "auto",
    locked: Annotated[
        bool,
        typer.Option(
            "--locked", help="Refuse a variant or additions without a lock, and a mirror without the locked packages."
        ),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be built.")] = False,
    as_json: AsJson = False,
    project: Project = None,
) -> None:
    """Build and tag the image of a variant, and with --with, --apt or --copy add to it."""
    matrix = open_matrix(project)
    chosen = matrix.variant(target, variant, with_debug, choose_platform(platform))
    packages = [name for names in apt or () for name in names.split(",")]
    chosen = chosen.extended(read_extension(requirements or (), packages, copy or ()))
    if chosen.platform != host_platform():
        raise UsageError(
            f"{chosen.identifier} is for {chosen.platform.name}, and this host is {host_platform().name}",
            "build it on such a machine; `buildkit lock` and `buildkit plan` work anywhere",
        )
    if extended and (warm or chosen.extension is None):
        raise UsageError(
            "--from only adds to an image", "give it --with, --apt, --copy or [extend] in a slipway.toml, and no --warm"
        )
    names = tuple(tag or ())
    if push and not (names and all(map(names_registry, names))):
        wrong = next((name for name in names if not names_registry(name)), "")
        raise UsageError(
            f"--push: {f'--tag {wrong} names' if wrong else 'no --tag names'} no registry",
            f"add --tag HOST[:PORT]/{(wrong or f'slipway:{chosen.identifier}').lstrip('/')}",
        )
    if dry_run:
        lock = read_lock(matrix, chosen)
        provider, reason = choose_provider(chosen.base, base, open_engine(engine), lock)
        emit({**describe(chosen), "provider": provider, "reason": reason})
        return
    opened = open_engine(engine)
    lock = lock_for_build(matrix, chosen, read_host(), cache_folder(), locked)
    source = Source(warm, warm_key or "", registry_ca) if warm else None
    parent = find_parent(extended, matrix, chosen, lock, opened, registry_ca) if extended else None
    result = build_image(matrix, chosen, opened, base, names, no_cache, progress, source, locked, parent)
    for name in names if push else ():
        opened.push(name)
    if as_json:
        emit(asdict(result))
        return
    errors.print(f"built in {result.seconds:.0f} s: {result.size / 1e9:.2f} GB, {result.image_id[:19]}")
    if result.base_changes:
        errors.print(f"[yellow]warning:[/] the base is not the locked one: {escape(shown(result.base_changes))}")
    for name in result.tags:
        sys.stdout.write(f"{name}\n")
