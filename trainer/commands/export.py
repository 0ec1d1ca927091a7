"""The command `export`."""

from pathlib import Path
from typing import Annotated

import typer

from trainer.commands.options import RunDirectory
from trainer.commands.output import emit


def export(
    run: RunDirectory,
    step: Annotated[
        int | None, typer.Option(min=0, help="Step of the checkpoint. The default is the last one.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Directory to write. The default is RUN/models/step_000010.")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="Where the run's starting model is now, if it moved.")] = None,
) -> None:
    """Write a checkpoint's policy as a model directory for Transformers and vLLM."""
    from trainer.runs.checkpoints.export import export_checkpoint

    emit(export_checkpoint(run, step, output, model))
