"""The command `targets`."""

from typing import Any

from rich.markup import escape
from rich.table import Table

from buildkit.commands.options import AsJson, Project, emit, open_matrix, table_console
from buildkit.recipe.matrix import Variant


def targets(as_json: AsJson = False, project: Project = None) -> None:
    """List targets and variants with their pins and status (proven or untested)."""
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
        status = status if variant.trains else f"cannot train; {status}"
        table.add_row(variant.target, variant.name, status, escape(" ".join(variant.requirements)))
    table_console(200).print(table)


def describe(variant: Variant) -> dict[str, Any]:
    return {
        "target": variant.target,
        "variant": variant.name,
        "status": variant.status,
        "proof": variant.proof,
        "trains": variant.trains,
        "base": variant.base.image,
        "python": variant.base.python,
        "pins": list(variant.requirements),
    }
