"""One event loop in a thread, for the coroutines of tools and users."""

import asyncio
import threading
from collections.abc import Coroutine
from functools import cache
from typing import Any, TypeVar

Result = TypeVar("Result")


def wait_for(coroutine: Coroutine[Any, Any, Result], timeout: float | None = None) -> Result:
    """What the coroutine returns, or raises. All coroutines share one loop, so their objects may too.

    Raises TimeoutError after `timeout` seconds, and cancels the coroutine: it would be kept for ever.
    """
    running = asyncio.run_coroutine_threadsafe(coroutine, _loop())
    try:
        return running.result(timeout)
    except TimeoutError as error:
        if not running.cancel():  # it has ended, with an error of its own
            raise
        raise TimeoutError(f"no answer within {timeout:g} s") from error


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="tools", daemon=True).start()
    return loop
