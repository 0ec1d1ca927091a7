"""Launches that form real Ray clusters, and what they must not leave."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.process_table import description, named

SMALL = ("--num-cpus", "1", "--num-gpus", "1", "--object-store-memory", str(100 * 1024**2))


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """Fails a test that leaves processes or directories of its launches."""
    with leaving_nothing():
        yield


@contextmanager
def leaving_nothing() -> Iterator[None]:
    """Fails if the block leaves processes or directories of its launches."""
    before = ray_directories()
    yield
    assert ray_directories() <= before
    lines = [description(pid) for pid in named("/tmp/slipway-ray-")]
    assert [line for line in lines if not any(str(path) in line for path in before)] == []


def ray_directories() -> set[Path]:
    return set(Path("/tmp").glob("slipway-ray-*"))
