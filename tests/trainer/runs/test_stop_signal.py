"""SIGTERM is taken at once before training, and only between phases during it."""

import os
import signal

import pytest

from trainer.errors import InterruptedRun
from trainer.runs.stop_signal import StopSignal


def test_before_training_the_signal_raises_at_once() -> None:
    with StopSignal() as stop:
        stop.check()
        with pytest.raises(InterruptedRun) as caught:
            os.kill(os.getpid(), signal.SIGTERM)
    assert caught.value.exit_code == 143


def test_during_training_the_signal_waits_for_a_phase_to_end() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignal() as stop:
        stop.defer()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(InterruptedRun):
            stop.check()
    assert signal.getsignal(signal.SIGTERM) is before
