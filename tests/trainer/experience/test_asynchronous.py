"""Sampling that continues while weights change. Fake engines return tokens that equal the version of the weights."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from trainer.config.tree import Config
from trainer.data.dataset import Prompt, PromptSampler
from trainer.experience.asynchronous import AsynchronousPipeline
from trainer.experience.collector import Experience, Phase, Scores, completed
from trainer.experience.conversations.sampler import Conversations
from trainer.experience.trajectory import Trajectory
from trainer.rewards.answer import Scored
from trainer.rollout.sampling import Part, Response, SamplingRequest

LAST = 6
LENGTHS = (3, 17, 1, 9)  # tokens of a step's responses, of which one in four is long
LIMIT = 20


class FakeEngines:
    """The prompt gives the length of its response; each token is the version of the weights that sampled it."""

    in_flight = False

    def __init__(self) -> None:
        self.version = 0
        self.asked: list[SamplingRequest] = []
        self.looks = 0  # at `under_way`
        self.left: dict[int, int] = {}  # tokens of the responses in flight
        self.updated_after_each_segment = False
        self.during_segment: Callable[[], None] = lambda: None
        self._sampled, self._samples = 0, threading.Condition()

    def wait_for_tokens(self, count: int) -> None:
        """Waits until so many tokens were sampled."""
        with self._samples:
            assert self._samples.wait_for(lambda: self._sampled >= count, timeout=60)
            assert self._sampled == count

    def _count(self, parts: Iterable[Response]) -> None:
        with self._samples:
            self._sampled += sum(len(part.token_ids) for part in parts)
            self._samples.notify_all()

    def generate(self, requests: Sequence[SamplingRequest], homes: None) -> list[Response]:
        assert not self.in_flight
        assert homes is None
        self.asked += requests
        self.during_segment()
        responses = [self._response(request) for request in requests]
        self._count(responses)
        self.version += self.updated_after_each_segment
        return responses

    def _response(self, request: SamplingRequest) -> Response:
        left = tokens_left(request)
        count = min(left, request.max_tokens or left)
        return Response((self.version,) * count, (-0.5,) * count, ended=count == left)

    @property
    def under_way(self) -> Set[int]:
        self.looks += 1
        return self.left.keys()

    def advance(self, new: Mapping[int, SamplingRequest], steps: int, homes: Mapping[int, int]) -> dict[int, Part]:
        assert self.in_flight
        assert not homes
        self.asked += new.values()
        self.during_segment()
        self.left |= {number: tokens_left(request) for number, request in new.items()}
        parts = {}
        for number, left in self.left.items():
            count = min(left, steps)
            parts[number] = Part((self.version,) * count, (-0.5,) * count, count == left, finished=count == left)
        self.left = {n: left - steps for n, left in self.left.items() if left > steps}
        self._count(parts.values())
        self.version += self.updated_after_each_segment
        return parts


def tokens_left(request: SamplingRequest) -> int:
    return request.prompt[0] - (len(request.prompt) - 1)


@pytest.fixture(autouse=True, params=[False, True], ids=["in segments", "in flight"])
def _(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test holds for both kinds of engines."""
    monkeypatch.setattr(FakeEngines, "in_flight", request.param)


@pytest.fixture
def _in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEngines, "in_flight", True)


class FakeCollector:
    """Draws from the sampler without scoring."""

    def __init__(self, sampler: PromptSampler, max_staleness: float) -> None:
        self.config = Config.model_validate(
            {
                "trainer": {"mode": "asynchronous", "max_staleness": max_staleness},
                "algorithm": {"correction": "tis"},
                "rollout": {"segment_length": 4, "samples_per_prompt": 1},
                "data": {"max_response_length": LIMIT},
                "actor": {"mini_batch_size": 64},
                "critic": {"mini_batch_size": 64},
            }
        )
        self.engines = FakeEngines()
        self.conversations = Conversations(self.config, self.engines, None)  # type: ignore[arg-type]
        self.sampler = sampler
        self.begun: list[tuple[int, int]] = []  # step, version
        self.rows: dict[int, list[Trajectory]] = {}  # by step
        self.failing_step: int | None = None

    def draw(self) -> list[Prompt]:
        return [Prompt(index, (LENGTHS[index % 4],), "", "", "") for index in self.sampler.next_batch()]

    def begin(self, prompts: Sequence[Prompt], step: int, first_row: int) -> list[Trajectory]:  # noqa: ARG002
        if step == self.failing_step:
            raise ValueError("bad luck")
        self.begun.append((step, self.engines.version))
        self.rows[step] = self.conversations.begin(prompts, range(len(prompts)), 1.0)
        return self.rows[step]

    def experience(self, prompts: list[Prompt], rows: list[Trajectory], phase: Phase) -> Experience:  # noqa: ARG002
        return Experience(prompts, rows, completed(Scores(torch.zeros(len(rows)), {})))


@contextmanager
def running(
    max_staleness: float, on_shared_gpus: bool = False, prompts: int = 4
) -> Iterator[tuple[AsynchronousPipeline, FakeCollector]]:
    sampler = PromptSampler(24, prompts, shuffle=False, seed=0)
    collector = FakeCollector(sampler, max_staleness)
    phase: Phase = lambda _name: nullcontext()  # noqa: E731
    others = sampling_threads()
    pipeline = AsynchronousPipeline(collector, sampler, phase, on_shared_gpus)  # type: ignore[arg-type]
    try:
        yield pipeline, collector
    finally:
        pipeline.close()
        assert sampling_threads() == others


def sampling_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "sample"]


def tokens(prompts: Iterable[int]) -> int:
    """Tokens of the responses to these prompts."""
    return sum(LENGTHS[index % 4] for index in prompts)


def settle(collector: FakeCollector, steps: int) -> None:
    """Waits until the engines have sampled whole responses for so many steps."""
    collector.engines.wait_for_tokens(steps * sum(LENGTHS))


def update(pipeline: AsynchronousPipeline, collector: FakeCollector) -> None:
    """The end of a step: the engines get new weights."""
    with pipeline.paused():
        collector.engines.version += 1


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_no_token_exceeds_the_staleness_and_each_records_its_weights(max_staleness: int) -> None:
    with running(max_staleness) as (pipeline, collector):
        for step in range(1, LAST + 1):
            experience = pipeline.take(step, LAST)
            assert [prompt.index for prompt in experience.prompts] == list(range(4 * step - 4, 4 * step))
            for prompt, row in zip(experience.prompts, experience.responses, strict=True):
                assert row.token_ids == row.versions
                assert len(row.token_ids) == prompt.token_ids[0]
            metrics = experience.staleness(collector.engines.version, shares=True)
            assert 0 <= metrics["rollout/staleness_mean"] <= metrics["rollout/staleness_max"] <= max_staleness
            update(pipeline, collector)
    assert [step for step, _ in collector.begun] == list(range(1, LAST + 1))  # and nothing for a step that never comes
    assert all(step - 1 - version <= max_staleness for step, version in collector.begun)


def test_a_fraction_of_a_step_s_prompts_may_start_one_update_earlier() -> None:
    with running(max_staleness=0.5) as (pipeline, collector):
        for step in range(1, LAST + 1):
            rows = pipeline.take(step, LAST).responses
            ages = [collector.engines.version - min(row.versions) for row in rows]
            assert max(ages[:2]) <= 1
            assert ages[2:] == [0, 0]
            if step < LAST:  # the first half of the next step needs no update
                collector.engines.wait_for_tokens(step * sum(LENGTHS) + sum(LENGTHS[:2]))
                (ahead,) = pipeline.sampled_ahead(step)
                assert [row.done for row in ahead.rows] == [True, True, False, False]
            update(pipeline, collector)


def test_engines_on_the_trainers_gpus_stand_still_from_a_complete_step_to_the_next_weights() -> None:
    with running(max_staleness=1, on_shared_gpus=True) as (pipeline, collector):
        samples = threading.Event()
        collector.engines.during_segment = samples.set
        for step in range(1, LAST + 1):
            pipeline.take(step, LAST)
            samples.clear()
            assert not samples.wait(0.05)
            with pipeline.paused():  # as for weights
                collector.engines.version += 1
                assert not samples.is_set()
    # The next step's responses fill the engines while a step waits for its longest one.
    assert collector.begun[:2] == [(1, 0), (2, 0)]


def test_a_response_continues_under_new_weights() -> None:
    with running(max_staleness=0) as (pipeline, collector):
        collector.engines.updated_after_each_segment = True
        rows = pipeline.take(1, LAST).responses
    assert [row.versions for row in rows] == [[place // 4 for place in range(length)] for length in LENGTHS]


@pytest.mark.usefixtures("_in_flight")
def test_a_response_in_flight_is_asked_for_once() -> None:
    with running(max_staleness=0) as (pipeline, collector):
        collector.engines.updated_after_each_segment = True
        pipeline.take(1, 1)
    assert [request.prompt for request in collector.engines.asked] == [(length,) for length in LENGTHS]


@pytest.mark.usefixtures("_in_flight")
def test_the_engines_are_asked_once_a_segment_what_is_under_way() -> None:
    segments: list[None] = []
    with running(max_staleness=0) as (pipeline, collector):
        collector.engines.during_segment = lambda: segments.append(None)
        pipeline.take(1, LAST)
        assert collector.engines.looks == len(segments)


@pytest.mark.usefixtures("_in_flight")
def test_a_response_that_an_engine_lost_is_asked_for_again_with_its_tokens() -> None:
    with running(max_staleness=0) as (pipeline, collector):
        segments: list[int] = []

        def lose() -> None:
            segments.append(len(collector.engines.asked))
            if len(segments) == 2:  # it slept, or it was replaced
                collector.engines.left.clear()

        collector.engines.during_segment = lose
        rows = pipeline.take(1, 1).responses
    assert [len(row.token_ids) for row in rows] == [*LENGTHS]
    again = collector.engines.asked[len(LENGTHS) :]
    # The first segment has finished two of the responses. The second one's tokens came to nothing.
    assert [request.prompt for request in again] == [(17, 0, 0, 0, 0), (9, 0, 0, 0, 0)]
    assert [request.max_tokens for request in again] == [LIMIT - 4] * 2


@pytest.mark.usefixtures("_in_flight")
def test_responses_in_flight_go_on_while_a_validation_samples() -> None:
    with running(max_staleness=1) as (pipeline, collector):
        pipeline.take(1, LAST)
        settle(collector, 2)
        entered, go_on = threading.Event(), threading.Event()

        def segment() -> None:
            entered.set()
            assert go_on.wait(timeout=60)

        collector.engines.during_segment = segment
        update(pipeline, collector)  # step 3 begins
        assert entered.wait(timeout=60)
        pausing = pipeline.paused()
        threading.Timer(0.1, go_on.set).start()
        with pausing:
            (held_out,) = collector.conversations.begin([Prompt(0, (20,), "", "", "")], [0], 0.0)
            collector.conversations.finish([held_out])
            assert len(held_out.token_ids) == 20
            (ahead,) = pipeline.sampled_ahead(2)
            assert all(row.done for row in ahead.rows)
        for step in (2, 3):  # and nobody waits for responses that are there
            assert len(pipeline.take(step, LAST).responses[1].token_ids) == 17


def ages(collector: FakeCollector, rows: Sequence[Trajectory]) -> list[list[int]]:
    """How many updates before now each token was sampled."""
    return [[collector.engines.version - version for version in row.versions] for row in rows]


def test_a_resumed_run_continues_its_responses_with_the_same_staleness() -> None:
    with running(max_staleness=2) as (pipeline, collector):
        for step in (1, 2):
            pipeline.take(step, LAST)
            update(pipeline, collector)
        settle(collector, 5)
        ahead = pipeline.sampled_ahead(2)
        assert [sampled.step for sampled in ahead] == [3, 4, 5]
        with running(max_staleness=2) as (resumed, resumed_collector):
            for sampled in ahead:
                for row in sampled.rows:
                    row.versions = [version - collector.engines.version for version in row.versions]
            resumed.restore(ahead)
            for step in range(3, LAST + 1):
                first, second = pipeline.take(step, LAST), resumed.take(step, LAST)
                assert [prompt.index for prompt in second.prompts] == [prompt.index for prompt in first.prompts]
                assert ages(resumed_collector, second.responses) == ages(collector, first.responses)
                update(pipeline, collector)
                update(resumed, resumed_collector)
                settle(collector, LAST)
                settle(resumed_collector, LAST - 5)
            assert [step for step, _ in resumed_collector.begun] == [6]


def test_responses_are_kept_as_far_as_they_are_sampled() -> None:
    with running(max_staleness=0) as (pipeline, collector):
        pipeline.take(1, LAST)
        update(pipeline, collector)
        settle(collector, 2)
        (kept,) = pipeline.sampled_ahead(1)
        kept.rows[0].token_ids.clear()
        assert pipeline.take(2, LAST).responses[0].token_ids  # a copy was changed
        assert [sampled.step for sampled in pipeline.sampled_ahead(1)] == [2]  # until its update


def test_a_checkpoint_waits_for_a_segment_and_not_for_whole_responses() -> None:
    with running(max_staleness=1) as (pipeline, collector):
        pipeline.take(1, LAST)
        pipeline.take(2, LAST)
        entered, go_on = threading.Event(), threading.Event()

        def segment() -> None:
            entered.set()
            assert go_on.wait(timeout=60)

        collector.engines.during_segment = segment
        update(pipeline, collector)  # step 3 may begin; its longest response takes five segments
        assert entered.wait(timeout=60)
        threading.Timer(0.1, go_on.set).start()
        (kept,) = pipeline.sampled_ahead(2)
        assert kept.step == 3
        assert not all(row.done for row in kept.rows)
        assert len(pipeline.take(3, LAST).responses[1].token_ids) == 17


@pytest.mark.parametrize(
    ("max_staleness", "step", "started"),
    [(0.5, 1, 5), (0.3, 5, 3)],  # 5 + 1 + 0.3 - 6 is a little less than 0.3
)
def test_responses_that_would_be_older_than_the_settings_allow_do_not_start(
    max_staleness: float, step: int, started: int
) -> None:
    with running(max_staleness, prompts=10) as (pipeline, collector):
        pipeline.take(step, LAST)
        collector.engines.wait_for_tokens(tokens(range(10 + started)))
        (ahead,) = pipeline.sampled_ahead(step)
        assert [bool(row.token_ids) for row in ahead.rows] == [True] * started + [False] * (10 - started)


def test_conversations_with_environments_are_begun_again() -> None:
    with running(max_staleness=1) as (pipeline, collector):
        pipeline.take(1, LAST)
        settle(collector, 2)
        assert pipeline.sampled_ahead(1) != []
        row = collector.rows[2][0]
        row.environment = object()  # type: ignore[assignment]
        assert pipeline.sampled_ahead(1) == []
        row.environment = None
        row.scored = Scored(0.0, "environment: it could not be reset")
        assert pipeline.sampled_ahead(1) == []
        resumed = PromptSampler(24, 4, shuffle=False, seed=0)
        resumed.load_state_dict(pipeline.sampler_state())
    assert resumed.next_batch() == [4, 5, 6, 7]


def test_new_weights_wait_for_the_end_of_a_segment() -> None:
    entered, requested, updated = threading.Event(), threading.Event(), threading.Event()
    updated_within_segment: list[bool] = []

    def segment() -> None:
        entered.set()
        requested.wait(timeout=60)
        updated_within_segment.append(updated.wait(timeout=0.2))

    with running(max_staleness=1) as (pipeline, collector):
        pipeline.take(1, LAST)
        pipeline.take(2, LAST)
        collector.engines.during_segment = segment
        update(pipeline, collector)  # step 3 may begin
        assert entered.wait(timeout=60)
        requested.set()
        with pipeline.paused():
            updated.set()
    assert updated_within_segment[0] is False


def test_a_failure_is_raised_where_the_experience_is_taken() -> None:
    with running(max_staleness=0) as (pipeline, collector):
        collector.failing_step = 1
        with pytest.raises(ValueError, match="bad luck"):
            pipeline.take(1, LAST)


def test_a_failure_between_two_takes_is_raised_by_the_next_one_and_the_run_can_still_save() -> None:
    with running(max_staleness=1) as (pipeline, collector):
        collector.failing_step = 3
        pipeline.take(1, LAST)
        pipeline.take(2, LAST)
        update(pipeline, collector)
        for thread in sampling_threads():
            thread.join(timeout=60)
        assert sampling_threads() == []
        for _ in range(2):
            with pytest.raises(ValueError, match="bad luck"):
                pipeline.take(3, LAST)
        with pipeline.paused():
            assert pipeline.sampler_state()["position"] == 8


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, r"learns from an older policy: set algorithm\.correction"),
        ({"correction": "tis", "dynamic_sampling": True}, r"does not support algorithm\.dynamic_sampling"),
        ({"correction": "tis", "advantage": "remax"}, r"does not support algorithm\.advantage=remax"),
    ],
)
def test_contradictory_settings_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Config.model_validate({"trainer": {"mode": "asynchronous"}, "algorithm": settings})


def test_going_without_a_correction_must_be_asked_for() -> None:
    config = Config.model_validate({"trainer": {"mode": "asynchronous"}, "algorithm": {"correction": "none"}})
    assert config.algorithm.correction == "none"
