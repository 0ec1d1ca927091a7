"""Logs in a thread: a slow or unreachable server delays no step and ends no run."""

import logging
import queue
import threading
from collections.abc import Mapping

from trainer.records.logger import MetricsLogger

logger = logging.getLogger(__name__)

RETRY_SECONDS = 30.0
CLOSE_SECONDS = 60.0  # for what is not sent yet when the run ends, and for the end of the record


class RetryingLogger:
    """Passes metrics to a logger in a thread, in order. A step that cannot be sent is tried until the run ends."""

    def __init__(self, name: str, inner: MetricsLogger, retry_seconds: float = RETRY_SECONDS) -> None:
        self._name, self._inner, self._retry = name, inner, retry_seconds
        self._rows: queue.Queue[tuple[int, Mapping[str, float]] | None] = queue.Queue()
        self._closing = threading.Event()
        self._lost, self._failed = 0, False
        self._thread = threading.Thread(target=self._send_all, name=f"logger {name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._rows.put((step, dict(metrics)))

    def close(self, failed: bool) -> None:
        """Tries each waiting step once more, and ends the record, within a time."""
        self._failed = failed
        self._closing.set()
        self._rows.put(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            logger.error(
                "%s: not done after %g s, and left: its server may lack the last steps; metrics.jsonl holds them all",
                *(self._name, CLOSE_SECONDS),
            )
        elif self._lost:
            logger.error("%s: not all steps are sent; metrics.jsonl holds them all", self._name)

    def _send_all(self) -> None:
        while (row := self._rows.get()) is not None:
            warned = False
            while not self._send(*row, warned):
                warned = True
                if self._closing.is_set():
                    self._lost += 1
                    break
                self._closing.wait(self._retry)
        try:
            self._inner.close(self._failed)
        except Exception as error:  # noqa: BLE001 - other people's packages may raise anything
            logger.warning("%s: the record cannot be ended: %s", self._name, error)

    def _send(self, step: int, metrics: Mapping[str, float], warned: bool) -> bool:
        try:
            self._inner.log(step, metrics)
        except Exception as error:  # noqa: BLE001 - other people's packages may raise anything
            if not warned:
                logger.warning("%s: step %d waits, it cannot be sent: %s", self._name, step, error)
            return False
        return True
