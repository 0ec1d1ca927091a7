"""The command `plan`."""

from dataclasses import asdict
from typing import Any

from rich.markup import escape
from rich.table import Table

from buildkit.commands.options import (
    AsJson,
    PlatformName,
    Project,
    TargetName,
    VariantName,
    WithDebug,
    emit,
    open_matrix,
    table_console,
)
from buildkit.errors import PlanError
from buildkit.images.build import cache_folder
from buildkit.images.extension import read_extension_lock
from buildkit.images.plan import Plan, make_plan
from buildkit.recipe.lock_file import read_lock
from buildkit.recipe.platform import choose_platform

MARKS = {"ok": "[green]ok[/]", "warn": "[yellow]warn[/]", "fail": "[bold red]FAIL[/]"}


def plan(
    target: TargetName,
    variant: VariantName = None,
    with_debug: WithDebug = False,
    platform: PlatformName = None,
    as_json: AsJson = False,
    project: Project = None,
) -> None:
    """Show the layers of a build, their predicted sizes, which of them are new, and whether the pins are compatible."""
    matrix = open_matrix(project)
    chosen = matrix.variant(target, variant, with_debug, choose_platform(platform))
    lock = read_lock(matrix, chosen)
    planned = make_plan(matrix, chosen, lock, cache_folder(), read_extension_lock(matrix, chosen, lock))
    if as_json:
        emit(describe(planned))
    else:
        show(planned)
    failed = [check.name for check in planned.checks if check.status == "fail"]
    if failed:
        raise PlanError(
            f"the pins of {chosen.identifier} are incompatible: {', '.join(failed)}",
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
    console = table_console(120)
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
