"""One fault of every cheap kind, and two on two nodes; `python -m tests.chaos` injects many."""

import pytest

from tests.chaos import jobs, processes
from tests.chaos.injection import Injection, Kind


@pytest.mark.parametrize("kind", processes.KINDS, ids=lambda kind: kind.name)
def test_a_fault_leaves_nothing_and_costs_at_most_a_step(kind: Kind) -> None:
    assert kind.inject(0).problems == []


@pytest.mark.parametrize("name", ["worker node killed, no Ray", "command killed, no Ray"])
def test_a_job_on_two_nodes_keeps_its_promises(name: str) -> None:
    (kind,) = [kind for kind in jobs.WITHOUT_RAY if kind.name == name]
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
