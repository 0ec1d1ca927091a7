"""Signals are taken at once before training, and only between phases during it."""

import os
import signal

import pytest

from trainer.errors import InterruptedRun
from trainer.runs.stop_signal import StopSignal


@pytest.mark.parametrize(
    ("number", "exit_code"),
    [
        (signal.SIGTERM, 143),
        (signal.SIGINT, 130),
        (signal.SIGHUP, 129),
        (signal.SIGXCPU, 152),
        (signal.SIGUSR2, 140),
    ],
)
def test_before_training_the_signal_raises_at_once(number: signal.Signals, exit_code: int) -> None:
    with StopSignal() as stop:
        stop.check()
        with pytest.raises(InterruptedRun, match=f"stopped by {number.name}") as caught:
            os.kill(os.getpid(), number)
    assert caught.value.exit_code == exit_code


def test_during_training_the_signal_waits_for_a_phase_to_end() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignal() as stop:
        stop.defer()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(InterruptedRun):
            stop.check()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_sigint_ends_the_run_wherever_it_is() -> None:
    with StopSignal() as stop:
        stop.defer()
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_run_under_nohup_stays_deaf_to_a_hangup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            stop.check()
    finally:
        signal.signal(signal.SIGHUP, before)
