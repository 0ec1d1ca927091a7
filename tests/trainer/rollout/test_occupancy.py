"""How full an engine is: sums over samples of its load, and metrics of several engines."""

import threading
from queue import Queue

import pytest

from trainer.rollout.occupancy import Load, Occupancy, sampling_load
from trainer.rollout.sampling import Response, SamplingRequest

REQUESTS = [SamplingRequest((1, 2, 3, 4), 1.0), SamplingRequest((1, 2, 3, 4, 5, 6), 1.0)]


def test_means_are_over_the_samples_of_all_engines() -> None:
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


def test_an_engine_without_a_prefix_cache_or_a_sample_has_no_such_metrics() -> None:
    assert Occupancy.of([], REQUESTS, [Response((7,), None)] * 2).metrics(16) == {}
    assert Occupancy.of([Load(2, 20)], [], []).metrics(16) == {
        "engines/running": 2.0,
        "engines/running_share": 0.125,
        "engines/tokens_in_flight": 20.0,
    }


class Clock:
    """Waits in the sampling thread until the test lets a number of intervals pass."""

    def __init__(self) -> None:
        self._begun: Queue[None] = Queue()
        self._passed = threading.Semaphore(0)

    def wait(self, ended: threading.Event) -> bool:
        self._begun.put(None)
        while not self._passed.acquire(timeout=0.01):
            if ended.is_set():
                return True
        return False

    def let_pass(self, intervals: int) -> None:
        """Returns once the thread has taken a sample after each interval."""
        for _ in range(intervals):
            self._begun.get(timeout=10)
            self._passed.release()
        self._begun.get(timeout=10)
        self._begun.put(None)


def test_the_load_is_sampled_while_the_engine_decodes_and_not_afterwards() -> None:
    clock, loads = Clock(), iter([Load(3, 30), Load(3, 40), None, Load(0, 0), Load(1, 1)])
    with sampling_load(lambda: next(loads), clock.wait) as sampled:
        clock.let_pass(2)
        assert sampled == [Load(3, 30), Load(3, 40)]
        clock.let_pass(2)  # the load is unknown, then nothing runs
    assert sampled == [Load(3, 30), Load(3, 40)]
    assert next(loads) == Load(1, 1)  # no sample after the end
