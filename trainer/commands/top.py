"""The command `top`."""

import io

from trainer.commands.options import RunDirectory
from trainer.commands.output import emit


def top(run: RunDirectory) -> None:
    """Show a run live: phases of the last step, metrics as they move, this host's GPUs; once if piped."""
    from rich.console import Console

    from trainer.records.top import watch

    console = Console()
    if console.is_terminal:
        watch(run, console)
        return
    page = io.StringIO()
    watch(run, Console(file=page, width=console.width))
    emit(page.getvalue().rstrip("\n"))
