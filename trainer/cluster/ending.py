"""The end of a process that uses Ray: bounded, also if Ray does not answer. Imports Ray only if it was used."""

import atexit
import logging
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import NoReturn

from trainer.background import in_background

PATIENCE = 5.0  # seconds that Ray has to disconnect, which takes less than one

logger = logging.getLogger(__name__)
_hanging: list[Future[None]] = []
_last_steps: list[Callable[[], object]] = []


def disconnect(seconds: float = PATIENCE) -> None:
    """Disconnects from Ray, which waits without a limit for a raylet or a GCS that is stopped or hangs."""
    import ray

    shutdown: Future[None] = in_background(ray.shutdown, "ray.shutdown")
    if wait([shutdown], seconds).done:
        shutdown.result()
        return
    logger.warning("Ray does not answer: this process ends without disconnecting from it")
    atexit.unregister(ray.shutdown)
    _hanging.append(shutdown)


def ray_hangs() -> bool:
    """Whether an earlier `disconnect` still waits for Ray, so that no other connection is possible."""
    return any(not shutdown.done() for shutdown in _hanging)


def before_exit(step: Callable[[], object]) -> None:
    """Takes a step when the process ends: Ray ends a process whose raylet is killed, with a status of its own."""
    _last_steps.append(step)
    atexit.register(step)


def leave(status: int | None) -> NoReturn:
    """Ends the process. If Ray hangs, the interpreter's own end would wait for it too, or crash."""
    if not ray_hangs():
        sys.exit(status)
    sys.stdout.flush()
    sys.stderr.flush()
    logging.shutdown()
    for step in _last_steps:
        step()
    os._exit(status or 0)
