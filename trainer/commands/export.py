"""The command `export`."""

from pathlib import Path
from typing import Annotated

import typer

from trainer.commands.options import RunDirectory
from trainer.commands.output import emit
from trainer.errors import ConfigError
from trainer.hub import HUB_NAME


def export(
    run: RunDirectory,
    step: Annotated[
        int | None, typer.Option(min=0, help="Step of the checkpoint. The default is the last one.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Directory to write. The default is RUN/models/step_000010.")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="Where the run's starting model is now, if it moved.")] = None,
    push_to_hub: Annotated[
        str | None,
        typer.Option(metavar="OWNER/NAME", help="Also upload it to the Hugging Face hub."),
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="A new repository is private.")] = False,
) -> None:
    """Write a checkpoint's policy as a model directory for Transformers and vLLM."""
    if private and push_to_hub is None:
        raise ConfigError("--private changes nothing without --push-to-hub", hint="add --push-to-hub OWNER/NAME")
    if push_to_hub is not None and not HUB_NAME.fullmatch(push_to_hub):
        raise ConfigError(f"--push-to-hub {push_to_hub}: not a name like OWNER/NAME", hint="name the owner, too")
    from trainer.runs.checkpoints.export import export_checkpoint

    directory = export_checkpoint(run, step, output, model)
    emit(directory)
    if push_to_hub is not None:
        from trainer.hub import push_model
        from trainer.records.pages.model_card import name_model

        name_model(directory, push_to_hub)
        emit(push_model(directory, push_to_hub, private))
