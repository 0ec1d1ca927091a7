"""The command `doctor`."""

from dataclasses import asdict
from pathlib import Path

import typer
from rich.markup import escape
from rich.table import Table

from buildkit.commands.options import AsJson, Project, emit, open_matrix, table_console
from buildkit.errors import MatrixError
from buildkit.host.machine import read_machine
from buildkit.recipe.matrix import Matrix
from buildkit.running.doctor import FAIL, OK, WARN, HostCheck, examine, find

STYLES = {OK: "green", WARN: "yellow", FAIL: "bold red"}


def doctor(as_json: AsJson = False, project: Project = None) -> None:
    """Check whether this host can build and run the images. Exits with 1 if a check fails."""
    matrix, trouble = open_or_none(project)
    checks = [*trouble, *examine(find(read_machine(), matrix))]
    if as_json:
        emit([asdict(check) for check in checks])
    else:
        show(checks)
    raise typer.Exit(1 if any(check.status == FAIL for check in checks) else 0)


def open_or_none(project: Path | None) -> tuple[Matrix | None, list[HostCheck]]:
    try:
        return open_matrix(project), []
    except MatrixError as error:
        return None, [HostCheck("project", FAIL, str(error), error.hint)]


def show(checks: list[HostCheck]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("check", "status", "value", "fix"):
        table.add_column(column, overflow="fold")
    for check in checks:
        style = STYLES[check.status]
        table.add_row(check.check, f"[{style}]{check.status}[/]", escape(check.value), escape(check.fix))
    table_console().print(table)
