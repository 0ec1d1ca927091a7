"""Waits for the Ray cluster that `launch train` forms beside this process."""

import os

from trainer.errors import WorkerError

READY_FD = "SLIPWAY_READY_FD"
"""A file descriptor that holds a byte once Ray is up, and ends without one if it never is."""


def wait_for_ray() -> None:
    """Waits until Ray is up; returns at once if this process was not started beside it, or has waited before.

    Exits without a message if Ray will never be up: `launch` has said why. Raises WorkerError if the variable names no
    open file.
    """
    given = os.environ.pop(READY_FD, None)
    if given is None:
        return
    try:
        with os.fdopen(int(given), "rb", buffering=0) as ready:
            up = ready.read(1)
    except (ValueError, OSError) as error:
        raise WorkerError(
            f"{READY_FD}={given} is no open file: {error}", hint="unset it: only `launch` sets it"
        ) from error
    if not up:
        raise SystemExit(WorkerError.exit_code)
