"""Sampling that goes on while weights change. Engines are played by a script whose tokens tell the weights' version."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from trainer.config.tree import Config
from trainer.data.dataset import Prompt, PromptSampler
from trainer.experience.asynchronous import AsynchronousPipeline
from trainer.experience.collector import Earned, Experience, Phase, done
from trainer.experience.conversations import Conversations
from trainer.experience.trajectory import Trajectory
from trainer.rollout.sampling import Request, Response

LAST = 6
LENGTHS = (3, 17, 1, 9)  # tokens of a step's responses, of which one in four is long
LIMIT = 20


class PlayedEngines:
    """A response ends when it is as long as its prompt says; every token is the version that sampled it."""

    def __init__(self) -> None:
        self.version = 0
        self.at_work = 0
        self.updated_after_each_segment = False
        self.failure: Exception | None = None

    def generate(self, requests: Sequence[Request]) -> list[Response]:
        self.at_work += 1
        if self.failure:
            raise self.failure
        responses = [self._response(request) for request in requests]
        self.at_work -= 1
        self.version += self.updated_after_each_segment
        return responses

    def _response(self, request: Request) -> Response:
        left = request.prompt[0] - (len(request.prompt) - 1)
        count = min(left, request.max_tokens or left)
        return Response((self.version,) * count, (-0.5,) * count, ended=count == left)


class PlayedCollector:
    """Draws from the sampler, scores nothing."""

    def __init__(self, sampler: PromptSampler, max_staleness: int) -> None:
        self.config = Config.model_validate(
            {
                "trainer": {"mode": "asynchronous", "max_staleness": max_staleness},
                "algorithm": {"correction": "tis"},
                "rollout": {"segment_length": 4},
                "data": {"max_response_length": LIMIT},
            }
        )
        self.engines = PlayedEngines()
        self.conversations = Conversations(self.config, self.engines, None)  # type: ignore[arg-type]
        self.sampler = sampler
        self.begun: list[tuple[int, int]] = []  # step, version

    def draw(self) -> list[Prompt]:
        return [Prompt(index, (LENGTHS[index % 4],), "", "", "") for index in self.sampler.next_batch()]

    def begin(self, prompts: Sequence[Prompt], step: int, first_row: int) -> list[Trajectory]:  # noqa: ARG002
        self.begun.append((step, self.engines.version))
        return self.conversations.begin(prompts, range(len(prompts)), 1.0)

    def experience(self, prompts: list[Prompt], rows: list[Trajectory], phase: Phase) -> Experience:  # noqa: ARG002
        return Experience(prompts, rows, done(Earned(torch.zeros(len(rows)), {})))


@contextmanager
def running(max_staleness: int) -> Iterator[tuple[AsynchronousPipeline, PlayedCollector]]:
    sampler = PromptSampler(24, 4, shuffle=False, seed=0)
    collector = PlayedCollector(sampler, max_staleness)
    pipeline = AsynchronousPipeline(collector, sampler, lambda _name: nullcontext())  # type: ignore[arg-type]
    try:
        yield pipeline, collector
    finally:
        pipeline.close()
        assert threading.active_count() == 1 or all(thread.name != "sample" for thread in threading.enumerate())


def update(pipeline: AsynchronousPipeline, collector: PlayedCollector) -> None:
    """What a controller does at the end of a step."""
    with pipeline.paused():
        assert collector.engines.at_work == 0
        collector.engines.version += 1


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_no_token_is_older_than_it_may_be_and_every_one_knows_its_weights(max_staleness: int) -> None:
    with running(max_staleness) as (pipeline, collector):
        for step in range(1, LAST + 1):
            experience = pipeline.take(step, LAST)
            assert [prompt.index for prompt in experience.prompts] == list(range(4 * step - 4, 4 * step))
            for prompt, row in zip(experience.prompts, experience.responses, strict=True):
                assert row.token_ids == row.versions
                assert len(row.token_ids) == prompt.token_ids[0]
            metrics = experience.staleness(collector.engines.version)
            assert 0 <= metrics["rollout/staleness_mean"] <= metrics["rollout/staleness_max"] <= max_staleness
            update(pipeline, collector)
    assert [step for step, _ in collector.begun] == list(range(1, LAST + 1))  # and nothing for a step that never comes
    assert all(step - 1 - version <= max_staleness for step, version in collector.begun)


def test_a_response_goes_on_under_new_weights() -> None:
    with running(max_staleness=0) as (pipeline, collector):
        collector.engines.updated_after_each_segment = True
        rows = pipeline.take(1, LAST).responses
    assert [row.versions for row in rows] == [[place // 4 for place in range(length)] for length in LENGTHS]


def test_a_checkpoint_draws_again_what_was_under_way() -> None:
    with running(max_staleness=2) as (pipeline, collector):
        pipeline.take(1, LAST)
        update(pipeline, collector)
        pipeline.take(2, LAST)
        resumed = PromptSampler(24, 4, shuffle=False, seed=0)
        resumed.load_state_dict(pipeline.sampler_state())
    assert resumed.next_batch() == [8, 9, 10, 11]


def test_what_goes_wrong_is_raised_where_the_experience_is_taken() -> None:
    with running(max_staleness=0) as (pipeline, collector):
        pipeline.take(1, LAST)
        with pipeline.paused():
            collector.engines.version += 1
            collector.engines.failure = ValueError("bad luck")
        with pytest.raises(ValueError, match="bad luck"):
            pipeline.take(2, LAST)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, r"learns from an older policy: set algorithm\.correction"),
        ({"correction": "tis", "dynamic_sampling": True}, r"not with algorithm\.dynamic_sampling"),
        ({"correction": "tis", "advantage": "remax"}, r"not with algorithm\.advantage=remax"),
    ],
)
def test_what_does_not_go_together_is_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Config.model_validate({"trainer": {"mode": "asynchronous"}, "algorithm": settings})
