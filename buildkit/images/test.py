"""Runs the container tests of `tests/` against an image."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from buildkit.errors import UsageError
from buildkit.running.nodes import TIMED_OUT

TIERS = ("smoke", "cluster")
CLEAN_UP = 30  # seconds in which interrupted tests remove their containers


def choose_tiers(name: str) -> tuple[str, ...]:
    """Raises `UsageError` for an unknown tier."""
    if name != "all" and name not in TIERS:
        raise UsageError(f"there is no tier `{name}`", f"one of: {', '.join(TIERS)}, all")
    return TIERS if name == "all" else (name,)


def run_container_tests(
    root: Path,
    target: str,
    image: str,
    tiers: tuple[str, ...],
    arguments: tuple[str, ...] = (),
    output: int | None = None,
    limit: float | None = None,
) -> int:
    """pytest's status. `output` is the file descriptor that gets its report, our own stdout when not given.

    Tests that run for more than `limit` seconds are interrupted, and the status is `TIMED_OUT`.
    """
    environment = {**os.environ, "SLIPWAY_TEST_IMAGE": image, "SLIPWAY_TEST_TARGET": target}
    folders = [str(root / "tests" / tier) for tier in tiers]
    command = [sys.executable, "-m", "pytest", *folders, *arguments]
    with subprocess.Popen(command, cwd=root, env=environment, stdout=output) as pytest:
        return wait_or_interrupt(pytest, limit)


def wait_or_interrupt(process: subprocess.Popen[bytes], limit: float | None) -> int:
    """The process' status; `TIMED_OUT` if it was interrupted because it ran for more than `limit` seconds."""
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(CLEAN_UP)
    except subprocess.TimeoutExpired:
        process.kill()
    return TIMED_OUT
