"""The three standard streams, which may be closed, broken or full."""

import errno
import os
import signal
import sys

from entrypoints.errors import OutputError

_MODES = ("r", "w", "w")


def open_closed() -> None:
    """Connect those standard streams that are closed to /dev/null.

    Otherwise the next file or socket that this process opens takes the place of one, for its children too.
    """
    for number, (name, mode) in enumerate(zip(("stdin", "stdout", "stderr"), _MODES, strict=True)):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115


def write(text: str) -> None:
    """Write a result to stdout. Raises OutputError; SystemExit with the status of SIGPIPE if its reader is gone."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        _abandon(1)
        if error.errno == errno.EPIPE:
            sys.exit(128 + signal.SIGPIPE)
        raise OutputError(f"cannot write to stdout: {error.strerror}") from error


def say(text: str = "") -> None:
    """Write a message to stderr, if anybody still reads that, and what the log has not written yet."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        _abandon(2)


def _abandon(number: int) -> None:
    """Let a stream that fails lead nowhere: Python flushes it again at its exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)
