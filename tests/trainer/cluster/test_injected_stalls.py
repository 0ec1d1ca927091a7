"""Stalls of real workers: the explanation names rank, node, phase and place."""

from collections.abc import Iterator

import pytest

from tests.stalls.faults import FAULTS, FULL_DISK, Fault, draw
from tests.stalls.injecting import Job, inject, job_of

RANKS = 2
ALWAYS = ("a rank is stopped", "a rank leaves out a collective", "a reward function hangs", "the controller loops")
FULL = pytest.mark.skipif(not FULL_DISK.is_dir(), reason=f"needs a small file system at {FULL_DISK}")


def case(fault: Fault) -> object:
    marks = [pytest.mark.full] if fault.name not in ALWAYS else []
    return pytest.param(fault, id=fault.name, marks=[*marks, FULL] if fault.name == "a full disk" else marks)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    with job_of(tmp_path_factory.mktemp("job"), RANKS, stall_seconds=2.0) as started:
        yield started


@pytest.mark.parametrize("fault", [case(fault) for fault in FAULTS])
def test_an_injected_stall_is_explained(job: Job, fault: Fault) -> None:
    injection = draw(fault, 7, RANKS)
    lines = inject(job, injection)
    assert injection.right(lines, job.address(injection.rank)), lines


def test_another_rank_node_phase_or_place_is_a_wrong_explanation() -> None:
    (fault,) = [fault for fault in FAULTS if fault.name == "a full disk"]
    injection = draw(fault, 1, RANKS)
    heading = "no progress in save for 2 s:"
    first = f"  actor rank {injection.rank} on n1 waits in wait (threading.py:9), called by write_to_a_full_disk "
    first += "(tests/stalls/rank.py:7)"
    disk = "  n1: the run's directory is full: 0 MiB of 8 are free"
    assert injection.right([heading, first, disk], "n1")
    for wrong in (
        ["no progress in load for 2 s:", first, disk],
        [heading, first.replace(f"rank {injection.rank}", "rank 9"), disk],
        [heading, first.replace("n1", "n2"), disk],
        [heading, first.replace("write_to_a_full_disk", "meet"), disk],
        [heading, disk, first],
        [heading, first, disk.replace("n1", "n2")],
        [],
    ):
        assert not injection.right(wrong, "n1")
