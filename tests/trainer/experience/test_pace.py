"""When an asynchronous run says that its learner waits, by a clock that the tests turn."""

import logging

import pytest

from trainer.experience.pace import Pace


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def run(
    max_staleness: float, longest: float, learning: float, steps: int = 12, known: bool = True, silent: bool = False
) -> None:
    """A run whose responses take `longest` seconds, and whose updates take `learning`."""
    clock = Clock()
    pace = Pace(max_staleness, clock, silent)
    begun: dict[int, float] = {}
    for step in range(steps):
        for begins in range(step, min(steps, step + int(max_staleness) + 1)):
            if begins not in begun:
                begun[begins] = clock.now
                if known:
                    pace.begins(begins)
        waited = max(0.0, begun[step] + longest - clock.now)
        at = clock.now + waited
        clock.now = begun[step] + longest
        pace.ends(step)
        clock.now = at
        pace.taken(step, waited)
        clock.now += learning


@pytest.fixture(autouse=True)
def _information(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def test_a_learner_that_waits_is_told_how_far_ahead_its_responses_would_have_to_begin(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run(max_staleness=2, longest=58, learning=14)
    (line,) = caplog.messages
    assert "those of a step take up to 58 s, and it learns from them in 14 s" in line
    assert "trainer.max_staleness=5 instead of 2 would" in line
    assert "waits for responses 42 % of the time" in line  # 30 s in three steps of 14 s


def test_it_would_not_wait_that_far_ahead(caplog: pytest.LogCaptureFixture) -> None:
    run(max_staleness=5, longest=58, learning=14)
    assert caplog.messages == []


def test_the_wait_for_the_first_responses_does_not_count(caplog: pytest.LogCaptureFixture) -> None:
    run(max_staleness=1, longest=10, learning=9)
    assert caplog.messages == []


def test_responses_of_an_earlier_process_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    run(max_staleness=2, longest=58, learning=14, known=False)
    assert caplog.messages == []


def test_nothing_is_said_of_engines_on_the_learner_s_gpus(caplog: pytest.LogCaptureFixture) -> None:
    run(max_staleness=2, longest=58, learning=14, silent=True)
    assert caplog.messages == []
