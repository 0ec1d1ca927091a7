"""What commands print on standard output."""

import signal
import sys
from contextlib import suppress

import typer

from trainer.errors import OutputError
from trainer.records.streams import discard_output


def emit(text: object) -> None:
    """Prints a result. Raises OutputError if it cannot be written; exits as programs do whose reader has ended."""
    try:
        typer.echo(text)
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output()
        raise SystemExit(128 + signal.SIGPIPE) from None
    except OSError as error:
        discard_output()
        raise OutputError(f"standard output cannot be written: {error}", hint="check where it leads") from error


def emit_result(path: object) -> None:
    """Prints where a run's result is. The run has ended well, whether or not somebody reads it."""
    with suppress(OutputError, SystemExit):
        emit(path)
