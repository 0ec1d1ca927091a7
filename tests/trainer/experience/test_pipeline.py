"""When experience is collected. A fake collector records the calls."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch

from trainer.config.tree import Config
from trainer.data.dataset import PromptSampler
from trainer.experience.collector import Experience, Phase, Scores, completed
from trainer.experience.pipeline import Pipeline

LAST = 4


class FakeCollector:
    """Draws prompts like the real one; samples while `gate` is closed."""

    def __init__(self, sampler: PromptSampler) -> None:
        self.sampler = sampler
        self.gate = threading.Event()
        self.gate.set()
        self.started: list[int] = []
        self.drawn: dict[int, list[int]] = {}

    def collect(self, step: int, phase: Phase) -> Experience:
        self.started.append(step)
        with phase("generate"):
            self.drawn[step] = self.sampler.next_batch()
            assert self.gate.wait(10)
        if step == 13:
            raise ValueError("bad luck")
        return Experience([], [], completed(Scores(torch.tensor([float(step)]), {})))


def make(ahead: bool) -> tuple[Pipeline, FakeCollector]:
    sampler = PromptSampler(20, 3, shuffle=True, seed=0)
    collector = FakeCollector(sampler)
    return Pipeline(collector, sampler, lambda _name: nullcontext(), ahead), collector


@contextmanager
def closing(pipeline: Pipeline) -> Iterator[None]:
    try:
        yield
    finally:
        pipeline.close()


def pause(pipeline: Pipeline) -> None:
    with pipeline.paused():
        pass


@pytest.mark.parametrize("ahead", [False, True])
def test_every_step_gets_its_own_experience(ahead: bool) -> None:
    pipeline, collector = make(ahead)
    with closing(pipeline):
        assert [pipeline.take(step, LAST).scores.result().values.item() for step in range(1, LAST + 1)] == [1, 2, 3, 4]
    assert collector.started == [1, 2, 3, 4]  # and nothing for a step that does not come


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_that_is_taken_again_gets_the_same_experience(ahead: bool) -> None:
    pipeline, collector = make(ahead)
    with closing(pipeline):
        first = pipeline.take(1, 2)
        pause(pipeline)
        place = pipeline.sampler_state()
        assert pipeline.take(1, 2) is first
        assert pipeline.sampler_state() == place
        assert pipeline.take(2, 2).scores.result().values.item() == 2
    assert collector.started == [1, 2]


def test_synchronous_mode_samples_nothing_ahead() -> None:
    pipeline, collector = make(ahead=False)
    pipeline.take(1, LAST)
    with pipeline.paused():
        assert collector.started == [1]


def test_one_step_ahead_sampling_continues_until_the_weights_change() -> None:
    pipeline, collector = make(ahead=True)
    with closing(pipeline):
        collector.gate.set()
        pipeline.take(1, LAST)
        with pipeline.paused():
            assert collector.started == [1, 2]
        collector.gate.clear()
        pipeline.take(2, LAST)  # is there already
        settled = threading.Thread(target=pause, args=(pipeline,))
        settled.start()
        settled.join(0.1)
        assert settled.is_alive()  # step 3 is still being sampled
        collector.gate.set()
        settled.join(10)
        assert not settled.is_alive()


def test_a_resumed_run_learns_from_what_was_sampled_ahead() -> None:
    """At the end of a step, and between the next one's experience and its update."""
    for interrupted in (False, True):
        pipeline, collector = make(ahead=True)
        resumed, others = make(ahead=True)
        with closing(pipeline), closing(resumed):
            pipeline.take(1, LAST)
            pause(pipeline)
            saved = pipeline.sampler_state()
            if interrupted:
                pipeline.take(2, LAST)
                pause(pipeline)
            (kept,) = pipeline.sampled_ahead(1)
            others.sampler.load_state_dict(saved)
            resumed.restore([kept])
            for continued in (pipeline, resumed)[interrupted:]:
                assert continued.take(2, LAST).scores.result().values.item() == 2
                pause(continued)
            assert others.started == [3]
            assert others.drawn[3] == collector.drawn[3]
            assert resumed.sampler_state() == kept.place


def test_nothing_is_kept_of_what_the_same_weights_would_sample_again() -> None:
    pipeline, _ = make(ahead=False)
    pipeline.take(2, LAST)
    assert pipeline.sampled_ahead(1) == []


def test_without_what_was_sampled_ahead_a_resumed_run_draws_the_prompts_again() -> None:
    pipeline, collector = make(ahead=True)
    with closing(pipeline):
        pipeline.take(1, LAST)
        pause(pipeline)
        resumed = PromptSampler(20, 3, shuffle=True, seed=0)
        resumed.load_state_dict(pipeline.sampler_state())
    assert resumed.next_batch() == collector.drawn[2]


def test_an_error_while_sampling_ahead_is_raised_at_its_step() -> None:
    pipeline, _ = make(ahead=True)
    with closing(pipeline):
        pipeline.take(12, 20)
        pause(pipeline)
        with pytest.raises(ValueError, match="bad luck"):
            pipeline.take(13, 20)


def test_an_older_policy_s_samples_need_a_correction() -> None:
    with pytest.raises(ValueError, match=r"set algorithm\.correction"):
        Config.model_validate({"trainer": {"mode": "one_step_off"}})
    Config.model_validate({"trainer": {"mode": "one_step_off"}, "algorithm": {"correction": "tis"}})
