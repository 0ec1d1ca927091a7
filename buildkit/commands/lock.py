"""The command `lock`."""

import sys
from typing import Annotated

import typer

from buildkit.commands.options import PlatformName, Project, TargetName, VariantName, WithDebug, open_matrix
from buildkit.errors import UsageError
from buildkit.host.settings import read_host
from buildkit.images.build import cache_folder, renew_extension
from buildkit.recipe.lock_file import extension_lock_path, lock_name, lock_path
from buildkit.recipe.platform import choose_platform
from buildkit.recipe.project import INSTALLED
from buildkit.running.engine import open_engine
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
    """Resolve a variant's pins into its lock file: every wheel and Debian package with its hash.

    Beside a slipway.toml it locks what the file adds, and the variants that the file defines.
    """
    matrix = open_matrix(project)
    chosen = matrix.variant(target, variant, with_debug, choose_platform(platform))
    path, extension = lock_path(matrix, chosen), extension_lock_path(matrix, chosen)
    if extension is None or path.is_relative_to(extension.parents[2]):  # both belong to the folder of slipway.toml
        if path.is_relative_to(INSTALLED):
            raise UsageError(
                f"the installed package's lock of {chosen.identifier} stays as it is",
                "run from a Slipway checkout, or name it with --project",
            )
        write_lock(matrix, chosen, read_host(), cache_folder(), upgrade, upgrade_base)
        sys.stdout.write(f"{lock_name(matrix, chosen)}\n")
    elif upgrade_base:
        raise UsageError(
            f"beside {extension.parents[2]}/slipway.toml, `lock` renews what the file adds, and no base",
            f"run `buildkit lock --upgrade-base --target {target}` in the folder of {lock_name(matrix, chosen)}",
        )
    if extension:
        renew_extension(matrix, chosen, open_engine(), upgrade)
        sys.stdout.write(f"{extension}\n")
