"""The command `samples`."""

from math import isnan
from typing import Annotated

import typer

from trainer.commands.options import RunDirectory
from trainer.commands.output import emit


def samples(
    run: RunDirectory,
    step: Annotated[int | None, typer.Option(min=0, help="The default is the last recorded step.")] = None,
    validation: Annotated[bool, typer.Option("--validation", help="Show the validation after the step.")] = False,
    best: Annotated[int | None, typer.Option(min=1, metavar="N", help="Show the N highest rewards.")] = None,
    worst: Annotated[int | None, typer.Option(min=1, metavar="N", help="Show the N lowest rewards.")] = None,
) -> None:
    """Show prompts, responses and rewards of a step or validation; without --best and --worst, the first four."""
    from trainer.records.files.run_files import recorded_trajectories
    from trainer.records.trajectories import show

    rows = recorded_trajectories(run, step, validation)
    ordered = sorted((row for row in rows if not isnan(row["reward"])), key=lambda row: row["reward"])
    chosen = (ordered[::-1][:best] if best else []) + (ordered[:worst] if worst else [])
    for row in chosen or rows[:4]:
        emit(show(row) + "\n")
