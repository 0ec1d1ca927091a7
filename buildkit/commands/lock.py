"""The command `lock`."""

import sys
from typing import Annotated

import typer

from buildkit.commands.options import PlatformName, Project, TargetName, VariantName, WithDebug, open_matrix
from buildkit.errors import UsageError
from buildkit.host.settings import read_host
from buildkit.images.build import cache_folder
from buildkit.recipe.lock_file import lock_name, lock_path
from buildkit.recipe.platform import choose_platform
from buildkit.recipe.project import INSTALLED
from buildkit.supply.resolve import write_lock


def lock(
    target: TargetName,
    variant: VariantName = None,
    with_debug: WithDebug = False,
    platform: PlatformName = None,
    upgrade: Annotated[
        bool, typer.Option("--upgrade", help="Take the newest versions that fit instead of the locked ones.")
    ] = False,
    upgrade_base: Annotated[
        bool, typer.Option("--upgrade-base", help="Take the newest packages of the base; every wheel stays.")
    ] = False,
    project: Project = None,
) -> None:
    """Resolve a variant's pins into its lock file: every wheel and Debian package with its hash."""
    matrix = open_matrix(project)
    chosen = matrix.variant(target, variant, with_debug, choose_platform(platform))
    if lock_path(matrix, chosen).is_relative_to(INSTALLED):
        raise UsageError(
            f"the installed package's lock of {chosen.identifier} stays as it is",
            "run from a Slipway checkout, or name it with --project",
        )
    write_lock(matrix, chosen, read_host(), cache_folder(), upgrade, upgrade_base)
    sys.stdout.write(f"{lock_name(matrix, chosen)}\n")
