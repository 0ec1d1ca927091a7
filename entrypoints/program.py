"""Any program of the image, run as in an image without `launch`: `docker run IMAGE bash`."""

import os
import shutil
import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

from entrypoints.errors import CommandNotFoundError, UsageError, did_you_mean

_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
"""Python ignores these signals from its start on, and a new program would inherit that."""


def run_program(words: Sequence[str], commands: Iterable[str], variables: Mapping[str, str]) -> NoReturn:
    """Replaces this process with a program, which keeps the process id, the environment and the open files.

    Raises UsageError if there is no such program, with the nearest of launch's `commands`.
    """
    name = words[0]
    if shutil.which(name, path=variables.get("PATH")) is None:
        known = list(commands)
        meant = did_you_mean(name, known, "`launch {}`")
        hint = f"{meant}the commands are {', '.join(known)}; `launch -- COMMAND ...` runs a program on the cluster"
        raise UsageError(f"{name!r} is neither a command of launch nor a program on the PATH", hint)
    for number in _IGNORED_BY_PYTHON:
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(name, list(words))
    except OSError as error:
        raise CommandNotFoundError(f"cannot run {name!r}: {error.strerror}") from error
