"""Runs the container tests of `tests/` against an image."""

import os
import secrets
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from buildkit.errors import UsageError
from buildkit.running.nodes import TIMED_OUT

TIERS = ("smoke", "cluster")
CLEAN_UP = 30  # seconds in which interrupted tests remove their containers
LABEL = "dev.slipway.test"  # of the tests' containers, networks and volumes; its value is the run's
# The first signal ends the tests and removes what they started; another one must not end that, too.
PYTEST = """
import signal, sys, pytest
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
def interrupt(*_):
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt
for number in SIGNALS:
    signal.signal(number, interrupt)
sys.exit(pytest.main())
"""


def choose_tiers(name: str) -> tuple[str, ...]:
    """Raises `UsageError` for an unknown tier."""
    if name != "all" and name not in TIERS:
        raise UsageError(f"there is no tier `{name}`", f"one of: {', '.join(TIERS)}, all")
    return TIERS if name == "all" else (name,)


def require_pytest() -> None:
    """Raises `UsageError` if what the container tests need is not installed."""
    if missing := [name for name in ("pytest", "testinfra", "pytest_timeout") if find_spec(name) is None]:
        raise UsageError(
            f"the container tests need {', '.join(missing)}, not installed here", "pip install 'slipway-rl[test]'"
        )


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

    Tests that run for more than `limit` seconds are interrupted, and the status is `TIMED_OUT`. However they end, their
    containers, networks and volumes are removed.
    """
    run = secrets.token_hex(8)
    names = {"SLIPWAY_TEST_IMAGE": image, "SLIPWAY_TEST_TARGET": target, "SLIPWAY_TEST_RUN": run}
    folders = [str(root / "tests" / tier) for tier in tiers]
    command = [sys.executable, "-c", PYTEST, *folders, *arguments]
    try:
        with subprocess.Popen(command, cwd=root, env={**os.environ, **names}, stdout=output) as pytest:
            return wait_or_interrupt(pytest, limit)
    finally:
        remove_leftovers(f"{LABEL}={run}")


def wait_or_interrupt(process: subprocess.Popen[bytes], limit: float | None) -> int:
    """The process' status; `TIMED_OUT` if it was interrupted because it ran for more than `limit` seconds.

    A signal to us interrupts it, too.
    """
    try:
        status = process.wait(limit)
        return status if status >= 0 else 128 - status
    except subprocess.TimeoutExpired:
        return TIMED_OUT
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Interrupts the process if it runs, and kills it if it then does not end."""
    if process.poll() is not None:
        return
    try:
        process.send_signal(signal.SIGINT)
        process.wait(CLEAN_UP)
    except subprocess.TimeoutExpired:
        pass
    finally:
        process.kill()


def remove_leftovers(label: str) -> None:
    """Removes the containers, networks and volumes with a label; there are some if the tests were killed."""
    docker = shutil.which("docker")
    if docker is None:
        return
    for listing, removal in (
        (["container", "ls", "--all"], ["container", "rm", "--force", "--volumes"]),
        (["network", "ls"], ["network", "rm"]),
        (["volume", "ls"], ["volume", "rm"]),
    ):
        command = [docker, *listing, "--quiet", "--filter", f"label={label}"]
        if names := subprocess.run(command, capture_output=True, text=True, check=False).stdout.split():
            subprocess.run([docker, *removal, *names], capture_output=True, check=False)
