"""A few of the stalls that `python -m tests.stalls` injects: the explanation names rank, node, phase and place."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stalls.faults import FAULTS, Fault, draw
from tests.stalls.injecting import Job, inject
from tests.stalls.records import Record, in_turn, markdown, record, recorded

CHOSEN = ("a rank is stopped", "a rank leaves out a collective", "a reward function hangs", "the controller loops")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    with Job(tmp_path_factory.mktemp("job"), ranks=2, stall_seconds=2.0) as started:
        yield started


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.name in CHOSEN], ids=lambda fault: fault.name)
def test_an_injected_stall_is_explained(job: Job, fault: Fault) -> None:
    outcome = inject(job, draw(fault, 7, ranks=2))
    assert outcome.right, outcome.lines


def test_another_rank_node_phase_or_place_is_a_wrong_explanation() -> None:
    (fault,) = [fault for fault in FAULTS if fault.name == "a full disk"]
    injection = draw(fault, 1, ranks=2)
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


def test_only_what_a_file_lacks_is_injected_and_the_table_counts_each_place(tmp_path: Path) -> None:
    file = tmp_path / "stalls.jsonl"
    first, second = FAULTS[:2]
    record(file, Record("2 ranks", first.name, 3, 0, "update", 1, True, 4.0, []))
    record(file, Record("4 nodes", first.name, 3, 0, "update", 1, False, 6.0, []))
    assert in_turn([first, second], "2 ranks", file, [3, 4]) == [(second, 3), (first, 4), (second, 4)]
    assert markdown(recorded(file))[2:] == [
        f"| {first.name} | 1 of 1 | 0 of 1 | 5.0, at most 6.0 |",
        "| all, right of injected | 1 of 1 | 0 of 1 | 5.0, at most 6.0 |",
    ]
