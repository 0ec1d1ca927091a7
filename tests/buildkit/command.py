"""The `buildkit` command in this process: a new one would need a second to import the command line."""

import contextlib
import io
import logging
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess
from unittest import mock

from buildkit.cli import main

ROOT = Path(__file__).parents[2]
ENDING = (signal.SIGTERM, signal.SIGHUP)


def run_buildkit(
    *arguments: str, cwd: Path = ROOT, environment: Mapping[str, str] | None = None
) -> CompletedProcess[str]:
    """Runs the console script in a folder, with these variables or, without any, those of this process.

    An error that the command does not turn into a message is raised here.
    """
    root, stdout, stderr = logging.getLogger(), io.StringIO(), io.StringIO()
    handlers, level = root.handlers, root.level
    before = [signal.getsignal(number) for number in ENDING]
    root.handlers = []
    try:
        with (
            mock.patch("sys.argv", ["buildkit", *arguments]),
            mock.patch("__main__.__package__", ""),  # else the command's name would be that of a module: pytest's
            mock.patch.dict(os.environ, {} if environment is None else environment, clear=environment is not None),
            contextlib.chdir(cwd),
            contextlib.redirect_stdout(stdout),
            contextlib.redirect_stderr(stderr),
        ):
            main()
        status: object = 0
    except SystemExit as ended:
        status = ended.code or 0
    finally:
        root.handlers = handlers
        root.setLevel(level)
        for number, handler in zip(ENDING, before, strict=True):
            signal.signal(number, handler)
    assert isinstance(status, int)
    return CompletedProcess(arguments, status, stdout.getvalue(), stderr.getvalue())
