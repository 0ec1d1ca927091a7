"""The command `replay`."""

from pathlib import Path
from typing import Annotated

import typer

from trainer.cluster.garbage import without_collections
from trainer.commands.options import EndedRun
from trainer.commands.output import emit


def replay(
    run: EndedRun,
    step: Annotated[
        int | None, typer.Option(min=1, help="Step to compare and to end at. The default is the last certified one.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="New run directory. The default is RUN-replay.")] = None,
) -> None:
    """Run the same settings again in a new directory, and compare metrics and weights to the bit.

    The exit status is 0 if both are equal, and 1 if not. A run whose image, data, models or hardware differ here, or
    whose mode depends on timing, is refused with the reasons (exit status 2).
    """
    with without_collections():
        from trainer.runs.reproduction.replay import replay as run_again

    comparison = run_again(run, step, output)
    emit("\n".join(comparison.lines()))
    if comparison.differences:
        raise typer.Exit(1)
