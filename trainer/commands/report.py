"""The command `report`."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, like runs/20260101T120000Z.")],
    output: Annotated[Path, typer.Option(help="Page that compares several runs.")] = Path("comparison.html"),
) -> None:
    """Write the report.html of a run, or a page that compares several runs."""
    if len(runs) > 1:
        from trainer.records.pages.comparison import write_comparison

        typer.echo(write_comparison(runs, output))
        return
    from trainer.records.pages.report import write_report

    typer.echo(write_report(runs[0]))
