"""Writes records in a thread, so a slow disk delays no step."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

MOST_WAITING = 10_000  # records
MOST_BYTES = 2**28  # of the records whose size is given


class RecordThread:
    """Writes records in a thread, in the order in which they are put.

    An error of a write is raised by the next call that finds it.
    """

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._waiting: deque[tuple[Future[None], int]] = deque()
        self._bytes = 0
        self._lock = threading.RLock()

    def put(self, write: Callable[[], None], size: int = 0) -> None:
        """Queues a record of `size` bytes. Blocks while the queue is full."""
        with self._lock:
            while self._waiting and (self._waiting[0][0].done() or self._full(size)):
                self._finish_first()
            self._waiting.append((self._thread.submit(write), size))
            self._bytes += size

    def flush(self) -> None:
        """Waits until all records are written."""
        with self._lock:
            while self._waiting:
                self._finish_first()

    def close(self) -> None:
        """`flush`, and ends the thread."""
        try:
            self.flush()
        finally:
            self._thread.shutdown()

    def _full(self, size: int) -> bool:
        return len(self._waiting) >= MOST_WAITING or self._bytes + size > MOST_BYTES

    def _finish_first(self) -> None:
        written, size = self._waiting.popleft()
        self._bytes -= size
        written.result()
