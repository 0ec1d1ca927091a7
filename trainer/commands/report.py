"""The command `report`."""

from pathlib import Path
from typing import Annotated

import typer

from trainer.commands.options import existing_runs
from trainer.commands.output import emit


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Run directories, like runs/20260101T120000Z.", callback=existing_runs)
    ],
    output: Annotated[Path, typer.Option(help="Page that compares several runs.")] = Path("comparison.html"),
    curve: Annotated[
        Path | None, typer.Option(help="Picture of the learning curve of one run: .png, .svg or .pdf.")
    ] = None,
) -> None:
    """Write the report.html of a run, or a page that compares several runs."""
    if len(runs) > 1:
        if curve is not None:
            raise typer.BadParameter("--curve shows one run; give one directory")
        from trainer.records.pages.comparison import write_comparison

        emit(write_comparison(runs, output))
        return
    from trainer.records.pages.report import save_learning_curve, write_report

    emit(write_report(runs[0]))
    if curve is not None:
        save_learning_curve(runs[0], curve)
        emit(curve)
