"""SIGTERM, handled where the run's state is consistent."""

import signal
from types import FrameType, TracebackType
from typing import Any, Self

from trainer.errors import InterruptedRun


class StopSignal:
    """While entered, SIGTERM raises InterruptedRun: at once before `defer`, afterwards only inside `check`."""

    def __init__(self) -> None:
        self._requested = False
        self._deferred = False
        self._previous: Any = None

    def __enter__(self) -> Self:
        self._previous = signal.signal(signal.SIGTERM, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGTERM, self._previous)

    def defer(self) -> None:
        """From now on the signal takes effect only in `check`."""
        self._deferred = True

    def check(self) -> None:
        """Raises InterruptedRun if the signal has come."""
        if self._requested:
            raise InterruptedRun("stopped by SIGTERM")

    def _receive(self, _number: int, _frame: FrameType | None) -> None:
        self._requested = True
        if not self._deferred:
            self.check()
