"""The command `lock`."""

import sys
from typing import Annotated

import typer

from buildkit.commands.options import Project, TargetName, VariantName, WithDebug, open_matrix
from buildkit.errors import UsageError
from buildkit.host.settings import read_host
from buildkit.images.build import cache_folder
from buildkit.recipe.project import INSTALLED
from buildkit.supply.resolve import write_lock


def lock(
    target: TargetName,
    variant: VariantName = None,
    with_debug: WithDebug = False,
    upgrade: Annotated[
        bool, typer.Option("--upgrade", help="Take the newest versions that fit instead of the locked ones.")
    ] = False,
    project: Project = None,
) -> None:
    """Resolve a variant's pins into its lock file: every wheel and Debian package with its hash."""
    matrix = open_matrix(project)
    if matrix.root == INSTALLED:
        raise UsageError(
            "the installed package's locks stay as they are", "run from a Slipway checkout, or name it with --project"
        )
    path = write_lock(matrix, matrix.variant(target, variant, with_debug), read_host(), cache_folder(), upgrade)
    sys.stdout.write(f"{path.relative_to(matrix.root)}\n")
