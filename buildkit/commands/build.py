"""The command `build`."""

import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from buildkit.commands.arguments import command
from buildkit.commands.options import (
    AsJson,
    BaseChoice,
    EngineName,
    PlatformName,
    Project,
    TargetName,
    VariantName,
    WarmCacheArguments,
    WithDebug,
    emit,
    errors,
    open_matrix,
)
from buildkit.commands.targets import describe
from buildkit.errors import UsageError
from buildkit.host.settings import read_host
from buildkit.images.build import BuildOptions, build_image, cache_folder
from buildkit.images.parent import find_parent
from buildkit.recipe.extension import read_extension
from buildkit.recipe.lock_file import read_lock
from buildkit.recipe.matrix import Matrix, Variant
from buildkit.recipe.platform import choose_platform, host_platform
from buildkit.running.engine import names_registry, open_engine
from buildkit.supply.base import choose_provider, shown
from buildkit.supply.resolve import lock_for_build


@dataclass(frozen=True, kw_only=True)
class BuildArguments:
    target: TargetName
    variant: VariantName = None
    with_debug: WithDebug = False
    platform: PlatformName = None
    base: BaseChoice = "auto"
    requirements: Annotated[
        list[Path],
        typer.Option(
            "--with", help="Requirements file, as pip reads it, to add to the image. Repeatable.", metavar="FILE"
        ),
    ] = field(default_factory=list)
    apt: Annotated[
        list[str],
        typer.Option("--apt", help="Debian packages to add to the image. Repeatable.", metavar="NAME[,NAME…]"),
    ] = field(default_factory=list)
    copy: Annotated[
        list[Path], typer.Option("--copy", help="Folder of your code to add to the image. Repeatable.", metavar="DIR")
    ] = field(default_factory=list)
    extended: Annotated[
        str | None,
        typer.Option(
            "--from", help="Add to this image, here or in a registry, instead of building its layers.", metavar="IMAGE"
        ),
    ] = None
    tag: Annotated[list[str], typer.Option("--tag", help="Additional tag. Repeatable.")] = field(default_factory=list)
    push: Annotated[
        bool,
        typer.Option(
            "--push",
            help="Push each --tag to its registry, as docker does. `publish` also tests, describes and signs.",
        ),
    ] = False
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Rebuild every layer.")] = False
    progress: Annotated[str, typer.Option(help="Progress output, as in docker: auto, plain or tty.")] = "auto"
    cache: WarmCacheArguments
    engine: EngineName = "auto"
    locked: Annotated[
        bool,
        typer.Option(
            "--locked", help="Refuse a variant or additions without a lock, and a mirror without the locked packages."
        ),
    ] = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be built.")] = False
    as_json: AsJson = False
    project: Project = None

    def choose(self, matrix: Matrix) -> Variant:
        """The variant with its additions. Raises `UsageError` for arguments that contradict each other."""
        chosen = matrix.variant(self.target, self.variant, self.with_debug, choose_platform(self.platform))
        packages = [name for names in self.apt for name in names.split(",")]
        chosen = chosen.extended(read_extension(self.requirements, packages, self.copy))
        if chosen.platform != host_platform():
            raise UsageError(
                f"{chosen.identifier} is for {chosen.platform.name}, and this host is {host_platform().name}",
                "build it on such a machine; `buildkit lock` and `buildkit plan` work anywhere",
            )
        if self.extended and (self.cache.warm or chosen.extension is None):
            raise UsageError(
                "--from only adds to an image",
                "give it --with, --apt, --copy or [extend] in a slipway.toml, and no --warm",
            )
        if self.push and not (self.tag and all(map(names_registry, self.tag))):
            wrong = next((name for name in self.tag if not names_registry(name)), "")
            raise UsageError(
                f"--push: {f'--tag {wrong} names' if wrong else 'no --tag names'} no registry",
                f"add --tag HOST[:PORT]/{(wrong or f'slipway:{chosen.identifier}').lstrip('/')}",
            )
        return chosen


@command
def build(arguments: BuildArguments) -> None:
    """Build and tag the image of a variant, and with --with, --apt or --copy add to it."""
    matrix = open_matrix(arguments.project)
    chosen = arguments.choose(matrix)
    engine = open_engine(arguments.engine)
    if arguments.dry_run:
        provider, reason = choose_provider(chosen.base, arguments.base, engine, read_lock(matrix, chosen))
        emit({**describe(chosen), "provider": provider, "reason": reason})
        return
    lock = lock_for_build(matrix, chosen, read_host(), cache_folder(), arguments.locked)
    ca = arguments.cache.registry_ca
    parent = find_parent(arguments.extended, matrix, chosen, lock, engine, ca) if arguments.extended else None
    options = BuildOptions(
        base=arguments.base,
        tags=tuple(arguments.tag),
        no_cache=arguments.no_cache,
        progress=arguments.progress,
        warm=arguments.cache.source,
        only_locked=arguments.locked,
        parent=parent,
    )
    result = build_image(matrix, chosen, engine, options)
    for name in arguments.tag if arguments.push else ():
        engine.push(name)
    if arguments.as_json:
        emit(asdict(result))
        return
    errors.print(f"built in {result.seconds:.0f} s: {result.size / 1e9:.2f} GB, {result.image_id[:19]}")
    if result.base_changes:
        errors.print(f"[yellow]warning:[/] the base is not the locked one: {escape(shown(result.base_changes))}")
    for name in result.tags:
        sys.stdout.write(f"{name}\n")
