"""A few of the stalls that `python -m tests.stalls` injects: the explanation names rank, node, phase and place."""

from collections.abc import Iterator

import pytest

from tests.stalls.faults import FAULTS, draw
from tests.stalls.injecting import Job, inject

CHOSEN = ("a rank is stopped", "a rank leaves out a collective", "a reward function hangs")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    with Job(tmp_path_factory.mktemp("job"), ranks=2, stall_seconds=2.0) as started:
        yield started


@pytest.mark.parametrize("name", CHOSEN)
def test_an_injected_stall_is_explained(job: Job, name: str) -> None:
    assert name in [fault.name for fault in FAULTS]
    found = inject(job, draw(7, ranks=2, only=name))
    assert found.right, found.lines
