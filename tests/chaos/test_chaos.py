"""One fault of every cheap kind, and two on two nodes; `python -m tests.chaos` injects many."""

from pathlib import Path

import pytest

from tests.chaos import checkpoints, nodes, processes, records, rewards
from tests.chaos.__main__ import in_turn
from tests.chaos.injection import Injection, Kind, markdown, record, recorded


@pytest.mark.parametrize(
    "kind", [*checkpoints.KINDS, *records.KINDS, *processes.KINDS, *rewards.KINDS], ids=lambda kind: kind.name
)
def test_a_fault_leaves_nothing_and_costs_at_most_a_step(kind: Kind) -> None:
    assert kind.inject(0).problems == []


@pytest.mark.parametrize("name", ["worker node killed, no Ray", "command killed, no Ray"])
def test_a_job_on_two_nodes_keeps_its_promises(name: str) -> None:
    (kind,) = [kind for kind in nodes.KINDS if kind.name == name]
    assert kind.inject(0).problems == []


def test_broken_promises_are_noticed() -> None:
    injection = Injection("killed", 0, processes=1, files=2, steps_lost=2, readable=False, cause="")
    injection.expect_clean()
    assert injection.problems == [
        "1 processes left",
        "2 files left",
        "2 steps lost",
        "no checkpoint can be read",
        "no message names the cause",
    ]


def test_only_missing_seeds_are_injected_and_kinds_take_turns(tmp_path: Path) -> None:
    file = tmp_path / "record.jsonl"
    record(file, Injection("a", 1))
    with file.open("a") as opened:
        opened.write('{"kind": "a", "se')  # killed while it wrote
    assert [injection.seed for injection in recorded(file)] == [1]
    record(file, Injection("c", 0))
    assert [injection.kind for injection in recorded(file)] == ["a", "c"]
    a, b = (Kind(name, lambda *_: None) for name in "ab")
    assert in_turn([a, b], file, 2) == [(a, 0), (b, 0), (b, 1)]


def test_the_table_has_a_row_per_kind() -> None:
    injections = [
        Injection("killed", 0, 2, "", 1.0, 2.0, [13], 0, 0, 0, True, "lost"),
        Injection("killed", 1, 4, "", 3.0, 2.0, [13, 12], 1, 0, 1, True, "", ["1 processes left"]),
    ]
    (row,) = markdown(injections)[2:]
    cells = "killed | 2, 1 of them on four nodes | 2.0, at most 3.0 | 12, 13 | 1, none | 1 | 2 of 2 | 1 of 2 | 1"
    assert row == f"| {cells} |"
