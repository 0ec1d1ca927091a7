"""The command `top`."""

from trainer.commands.options import RunDirectory


def top(run: RunDirectory) -> None:
    """Show a run live: phases of the last step, metrics as they move, this host's GPUs; once if piped."""
    from rich.console import Console

    from trainer.records.top import watch

    watch(run, Console())
