"""Runs the container tests of `tests/` against an image."""

import os
import subprocess
import sys
from pathlib import Path

from buildkit.errors import UsageError

TIERS = ("smoke", "cluster")


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
) -> int:
    """pytest's status. `output` is the file descriptor that gets its report, our own stdout when not given."""
    environment = {**os.environ, "SLIPWAY_TEST_IMAGE": image, "SLIPWAY_TEST_TARGET": target}
    folders = [str(root / "tests" / tier) for tier in tiers]
    command = [sys.executable, "-m", "pytest", *folders, *arguments]
    return subprocess.run(command, cwd=root, env=environment, stdout=output, check=False).returncode
