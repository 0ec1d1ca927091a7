"""Busy, idle and waiting workers: intervals with known lengths."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.cluster import timeline as timelines
from trainer.cluster.timeline import Answering, Timeline, covered


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timelines, "time", clock)
    return clock


def engine(number: int, begun: float, ended: float | None, method: str = "generate") -> Answering:
    return Answering(f"rollout rank {number} on n{number}", f"p{number}", ("n", number), method, begun, ended)


def test_workers_wait_for_the_slowest_and_it_is_named(clock: Clock) -> None:
    timeline = Timeline()
    timeline.add([engine(0, 100, 104), engine(1, 100, 110), engine(2, 100, 109)])
    timeline.add([engine(0, 110, 111), engine(1, 110, 110.5)])
    clock.now = 120.0
    rollout = timeline.since_begin().waiting["rollout"]
    assert rollout.seconds == pytest.approx((6 + 1) / 3 + 0.5 / 2)
    assert rollout.slowest == "rollout rank 1 on n1"


def test_a_worker_that_is_called_alone_keeps_nobody_waiting(clock: Clock) -> None:
    timeline = Timeline()
    timeline.add([engine(0, 100, 104)])
    clock.now = 120.0
    assert timeline.since_begin().waiting == {}


def test_a_device_is_idle_while_none_of_its_workers_has_a_call(clock: Clock) -> None:
    timeline = Timeline()
    timeline.add([engine(0, 100, 104), engine(1, 100, 110)])
    timeline.add([Answering("actor rank 0 on n0", "a0", ("n", 0), "update", 103, 107)])
    clock.now = 120.0
    busy = timeline.since_begin()
    assert busy.idle({("n", 0)}) == 20 - 7
    assert busy.idle({("n", 1)}) == 20 - 10
    assert busy.idle({("n", 0), ("n", 1)}) == pytest.approx((13 + 10) / 2)
    assert busy.idle({("elsewhere", 0)}) == 20


def test_calls_that_run_across_steps_belong_to_both(clock: Clock) -> None:
    timeline = Timeline()
    running, done = engine(0, 100, None), engine(1, 100, 103)
    timeline.add([running, done])
    clock.now = 110.0
    assert timeline.since_begin().of_workers("rollout", "generate") == [10.0, 3.0]
    timeline.begin()
    clock.now = 130.0
    running.ended = 114.0
    busy = timeline.since_begin()
    assert busy.of_workers("rollout", "generate") == [4.0]
    assert busy.seconds == 20.0


def test_engines_that_share_a_device_and_a_name_are_two(clock: Clock) -> None:
    timeline = Timeline()
    first = Answering("rollout rank 0 on n", "first", ("n", 0), "generate", 100, 104)
    other = Answering("rollout rank 0 on n", "second", ("n", 0), "generate", 100, 110)
    timeline.add([first, other, engine(3, 100, 120, method="sleep")])
    clock.now = 120.0
    assert timeline.since_begin().of_workers("rollout", "generate") == [4.0, 10.0]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=8))
def test_covered_seconds_are_those_on_a_grid(spans: Sequence[tuple[int, int]]) -> None:
    ends = [(start, start + length) for start, length in spans]
    assert covered(ends) == len({second for start, end in ends for second in range(start, end)})
