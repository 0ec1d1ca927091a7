"""Signals that ask a run to end, handled where its state is consistent."""

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

from trainer.errors import InterruptedRun

# Of a scheduler or a person, of a terminal that is closed, and the warnings before a limit of time. SIGUSR1 makes the
# stacks of a process visible, see trainer.cluster.stalls.
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGXCPU, signal.SIGUSR2)


class StopSignal:
    """While entered, a signal raises InterruptedRun: at once before `defer`, afterwards only inside `check`.

    A second SIGINT raises KeyboardInterrupt at once, wherever the run is. A signal that was ignored, like SIGHUP under
    `nohup`, stays so.
    """

    def __init__(self, also: Callable[[], None] = lambda: None) -> None:
        """`check` calls `also`, which may raise an error that ends the run."""
        self._also = also
        self._requested: signal.Signals | None = None
        self._deferred = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        heard = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        self._previous = {number: signal.signal(number, self._receive) for number in heard}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def defer(self) -> None:
        """From now on the signal takes effect only in `check`."""
        self._deferred = True

    def check(self) -> None:
        """Raises InterruptedRun if the signal has come, and what `also` raises."""
        self._also()
        if self._requested is not None:
            raise InterruptedRun(self._requested)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._requested == signal.SIGINT:
            raise KeyboardInterrupt
        self._requested = signal.Signals(number)
        if not self._deferred:
            self.check()
