"""Work in threads of which none can keep a process from going on or from ending."""

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import NoReturn, TypeVar

logger = logging.getLogger(__name__)

R = TypeVar("R")

EXIT_SECONDS = 60.0


def in_background(work: Callable[[], R], name: str) -> Future[R]:
    """The result of `work`, which a thread of that name computes. The process may end before it."""
    result: Future[R] = Future()

    def run() -> None:
        try:
            value = work()
        except BaseException as error:  # noqa: BLE001 - the caller of `result` gets it
            result.set_exception(error)
        else:
            result.set_result(value)

    threading.Thread(target=run, name=name, daemon=True).start()
    return result


def ended_within(seconds: float, work: Callable[[], object], left: str) -> bool:
    """Whether `work` ends within this time. If not, it goes on, and the log says what is `left` undone.

    Raises what `work` raises.
    """
    result = in_background(work, left)
    if not wait([result], seconds).done:
        logger.error("%s: not done after %g s, and left", left, seconds)
        return False
    result.result()
    return True


def end_process(status: int) -> NoReturn:
    """Ends this process: waits for its threads, calls exit functions and flushes, all within a time.

    The interpreter is not torn down: threads of Ray, gloo and CUDA that still run would crash in it.
    """

    def end() -> None:
        time.sleep(EXIT_SECONDS)
        waiting = [thread.name for thread in threading.enumerate() if thread.is_alive() and not thread.daemon]
        logger.error("not ended after %g s, and left: %s", EXIT_SECONDS, ", ".join(waiting))
        time.sleep(0.5)  # for the thread that writes the message
        os._exit(status)

    threading.Thread(target=end, name="exit", daemon=True).start()
    # As Python does when a program has ended.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError, ValueError):  # closed, by us or by the reader
            stream.flush()
    os._exit(status)
