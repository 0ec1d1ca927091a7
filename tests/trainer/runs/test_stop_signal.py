"""SIGTERM is taken at once before training, and only between phases during it."""

import os
import signal

import pytest

from trainer.errors import InterruptedRun
from trainer.runs.stop_signal import StopSignal


def test_before_training_it_raises_at_once() -> None:
    with StopSignal() as stop:
        stop.check()
        with pytest.raises(InterruptedRun) as caught:
            os.kill(os.getpid(), signal.SIGTERM)
    assert caught.value.exit_code == 143


def test_during_training_it_waits_to_be_asked() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignal() as stop:
        stop.defer()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(InterruptedRun):
            stop.check()
    assert signal.getsignal(signal.SIGTERM) is before
