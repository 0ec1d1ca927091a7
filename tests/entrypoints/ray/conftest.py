"""Launches that form real Ray clusters, and what they must not leave."""

from collections.abc import Iterator
from pathlib import Path

import pytest

SMALL = ("--num-cpus", "1", "--num-gpus", "1", "--object-store-memory", str(100 * 1024**2))


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """Fails a test that leaves processes or directories of its launches."""
    before = ray_directories()
    yield
    assert ray_directories() <= before
    lines = [line for _, line in processes() if "/tmp/slipway-ray-" in line]
    assert [line for line in lines if not any(str(path) in line for path in before)] == []


def ray_directories() -> set[Path]:
    return set(Path("/tmp").glob("slipway-ray-*"))


def processes() -> list[tuple[int, str]]:
    """Process ids and command lines."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            found.append((int(entry.name), (entry / "cmdline").read_text(encoding="utf-8", errors="replace")))
        except OSError:
            continue
    return found
