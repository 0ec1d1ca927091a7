"""The end of a process that uses Ray: bounded, also if Ray does not answer. Imports Ray only if it was used."""

import atexit
import logging
import os
import sys
import threading
from typing import NoReturn

_PATIENCE = 5.0  # seconds that Ray has to disconnect, which takes less than one

logger = logging.getLogger(__name__)
_hanging: list[threading.Thread] = []


def disconnect() -> None:
    """Disconnects from Ray, which waits without a limit for a raylet or a GCS that is stopped or hangs."""
    import ray

    thread = threading.Thread(target=ray.shutdown, name="ray.shutdown", daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    if thread.is_alive():
        logger.warning("Ray does not answer: this process ends without disconnecting from it")
        atexit.unregister(ray.shutdown)
        _hanging.append(thread)


def ray_hangs() -> bool:
    """Whether an earlier `disconnect` still waits for Ray, so that no other connection is possible."""
    return any(thread.is_alive() for thread in _hanging)


def leave(status: int | None) -> NoReturn:
    """Ends the process. If Ray hangs, the interpreter's own end would wait for it too, or crash."""
    if not ray_hangs():
        sys.exit(status)
    sys.stdout.flush()
    sys.stderr.flush()
    logging.shutdown()
    os._exit(status or 0)
