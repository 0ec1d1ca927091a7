"""The command `verify`."""

import typer

from trainer.commands.options import EndedRun
from trainer.commands.output import emit


def verify(run: EndedRun) -> None:
    """Compare a run with its certificate: data, models, settings, checkpoints, exported model.

    Prints each difference, and each input that could not be hashed when the certificate was written. The exit status
    is 0 if there is none, else 1.
    """
    from trainer.runs.reproduction.verify import verify as differences_of

    differences = differences_of(run)
    emit("\n".join(differences) or f"{run}: as certified")
    if differences:
        raise typer.Exit(1)
