"""Weights from one process to several at once. Over gloo: two GPUs, which NCCL needs, are not at hand."""

import os
import subprocess
import sys
import time
from pathlib import Path

PROGRAM = Path(__file__).with_name("channel_program.py")


def start(rank: int, port: int) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, PROGRAM, str(rank), "3", str(port)],
        env={**os.environ, "PYTHONPATH": str(PROGRAM.parents[2])},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_over_gloo_weights_arrive_at_all_and_a_lost_peer_is_noticed_by_all() -> None:
    sender = start(0, 0)
    assert sender.stdout is not None
    port = int(sender.stdout.readline())
    receivers = [start(1, port), start(2, port)]
    started = time.monotonic()
    sent, stayed, left = (process.communicate(timeout=100)[0].splitlines() for process in (sender, *receivers))
    assert time.monotonic() - started < 100  # nobody waited for the whole 120 s
    assert sent[:-1] == ["sent"] * (len(sent) - 1)
    assert stayed[: len(left)] == left == ["same"] * len(left)
    assert len(left) == 2
    # The last bucket misses a receiver: whoever was to hear from it, or through it, hears that the connection is gone.
    assert "the channel for weights broke" in "".join(sent[-1:] + stayed[-1:])
