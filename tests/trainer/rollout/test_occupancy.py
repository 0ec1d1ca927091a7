"""How full an engine is: sums over looks at it, and metrics of several engines."""

import time

import pytest

from trainer.rollout import occupancy
from trainer.rollout.occupancy import Load, Occupancy, looking
from trainer.rollout.sampling import Response, SamplingRequest

REQUESTS = [SamplingRequest((1, 2, 3, 4), 1.0), SamplingRequest((1, 2, 3, 4, 5, 6), 1.0)]


def test_means_are_over_the_looks_of_all_engines() -> None:
    full = Occupancy.of([Load(8, 800, 0.5), Load(4, 600, 0.3)], REQUESTS, [Response((7,), None, cached_tokens=0)] * 2)
    nearly_done = Occupancy.of([Load(1, 100, 0.1)], REQUESTS, [Response((7,), None, cached_tokens=4)] * 2)
    metrics = (full + nearly_done).metrics(max_num_seqs=16)
    assert metrics == {
        "engines/running": pytest.approx(13 / 3),
        "engines/running_share": pytest.approx(13 / 3 / 16),
        "engines/tokens_in_flight": 500.0,
        "engines/cache_usage": pytest.approx(0.3),
        "engines/prefix_hits": pytest.approx(8 / 20),
    }


def test_the_share_of_accepted_drafts_is_over_all_engines() -> None:
    some = Occupancy(drafted_tokens=30, accepted_tokens=10) + Occupancy(drafted_tokens=10, accepted_tokens=10)
    assert some.metrics(16) == {"engines/accepted_share": 0.5}


def test_an_engine_without_a_prefix_cache_or_a_look_has_no_such_metrics() -> None:
    assert Occupancy.of([], REQUESTS, [Response((7,), None)] * 2).metrics(16) == {}
    assert Occupancy.of([Load(2, 20)], [], []).metrics(16) == {
        "engines/running": 2.0,
        "engines/running_share": 0.125,
        "engines/tokens_in_flight": 20.0,
    }


def test_a_thread_looks_while_the_engine_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(occupancy, "INTERVAL", 0.01)
    now = [Load(3, 30), None, Load(0, 0)]
    with looking(lambda: now[0]) as loads:
        time.sleep(0.1)
        now.pop(0)  # the engine does not know
        time.sleep(0.05)
        now.pop(0)  # it has finished
        time.sleep(0.05)
    assert loads
    assert set(loads) == {Load(3, 30)}
    ended = len(loads)
    now[0] = Load(1, 1)
    time.sleep(0.05)
    assert len(loads) == ended
