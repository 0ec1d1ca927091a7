"""When rewards are computed. The reward workers are fakes that wait for a signal."""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from trainer.cluster.calls import Task
from trainer.config.tree import Config
from trainer.data.dataset import Prompt, PromptSampler
from trainer.errors import FailedResponsesError, RewardError, WorkerError
from trainer.experience.collector import Collector, Experience, Scores, completed
from trainer.experience.failures import check_failed_shares
from trainer.experience.reward_workers import RewardWorkers, Scorer
from trainer.experience.run_data import RunData
from trainer.experience.trajectory import Trajectory
from trainer.models.small import build_tokenizer
from trainer.rewards.answer import Answer, Scored
from trainer.rollout.engines import split


class FakeRewards:
    """Two workers whose reward for a response is its ground truth."""

    def __init__(self) -> None:
        self.told = threading.Event()

    def __len__(self) -> int:
        return 2

    def attempt(
        self, tasks: Mapping[int, Task[Scorer, list[Scored]]], _timeout: float
    ) -> tuple[dict[int, list[Scored]], dict[int, WorkerError]]:
        assert self.told.wait(30)
        parts: dict[int, list[Answer]] = {rank: task.arguments[0] for rank, task in tasks.items()}
        if any(answer.ground_truth == "bad" for part in parts.values() for answer in part):
            raise RewardError("bad luck")
        return {rank: [Scored(float(answer.ground_truth)) for answer in part] for rank, part in parts.items()}, {}


class Phases(list[str]):
    """Records the phases that the caller waits for."""

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.append(name)
        yield


def collector(rewards: FakeRewards, **reward: object) -> Collector:
    """A collector without engines and prompts."""
    config = Config.model_validate({"model": {"path": "/nowhere"}, "reward": reward})
    engines: Any = None
    dataset: Any = []
    group: Any = rewards
    prompts = RunData(build_tokenizer(["1 2 3"]), dataset, dataset, PromptSampler(4, 4, shuffle=False, seed=0))
    return Collector(config, engines, group, prompts)


def begun(made: Collector, phases: Phases, *truths: str) -> Experience:
    prompts = [Prompt(row, (1, 2), truth, "", "") for row, truth in enumerate(truths)]
    rows = [Trajectory(prompt.token_ids, 1.0, 0, 4, token_ids=[3], mask=[True]) for prompt in prompts]
    return made.experience(prompts, rows, phases)


def test_rewards_are_computed_in_the_background() -> None:
    rewards, phases = FakeRewards(), Phases()
    made = collector(rewards)
    experience = begun(made, phases, "1", "0", "2")
    assert experience.lengths.tolist() == [1, 1, 1]  # what the passes need is there
    assert not experience.scores.done()
    assert phases == []
    rewards.told.set()
    assert experience.scores.result(30).values.tolist() == [1, 0, 2]
    made.close()


def test_a_reward_model_uses_the_gpu_before_the_forward_passes() -> None:
    rewards, phases = FakeRewards(), Phases()
    made = collector(rewards, model={"path": "/judge"})
    threading.Timer(0.2, rewards.told.set).start()
    assert begun(made, phases, "1").scores.done()
    assert phases == ["reward"]
    made.close()


def test_an_error_is_raised_where_rewards_are_needed() -> None:
    rewards, phases = FakeRewards(), Phases()
    made = collector(rewards)
    rewards.told.set()
    experience = begun(made, phases, "1", "bad")
    with pytest.raises(RewardError, match="bad luck"):
        experience.scores.result(30)
    made.close()


def test_a_conversation_without_a_score_of_its_own_counts_as_failed_if_no_rule_knows_its_source() -> None:
    """Like one that the token limit cut: its environment scores the others itself."""
    rewards = FakeRewards()
    rewards.told.set()
    made = collector(rewards)
    made.config = Config.model_validate(
        {
            "rollout": {"environment": {"path": "/mine.py", "name": "Game"}},
            "reward": {"sources": {"known": "gsm8k"}, "failure_score": -1.0},
        }
    )
    prompts = [Prompt(row, (1,), "7", source, "") for row, source in enumerate(["mine", "mine", "known"])]
    rows = [Trajectory((1,), 1.0, 0, 4, token_ids=[3], mask=[True]) for _ in prompts]
    rows[0].scored = Scored(0.5)
    failed = Scored(-1.0, "the conversation ended without a score")
    assert made.score(prompts, rows) == [Scored(0.5), failed, Scored(7.0)]
    made.close()


FAILED = Scored(0.0, "environment: it died", cause="environment_error")


def scored_by_environment(made: Collector, *scores: Scored) -> Scores:
    """The scores of a step whose environment scored each row."""
    prompts = [Prompt(row // made.samples, (1,), "", "", "") for row in range(len(scores))]
    rows = [Trajectory((1,), 1.0, 0, 4, token_ids=[3], mask=[True], scored=score) for score in scores]
    return made.experience(prompts, rows, Phases()).scores.result(30)


def test_a_failed_response_is_in_no_mean_of_rewards() -> None:
    rewards = FakeRewards()
    rewards.told.set()
    made = collector(rewards)
    scores = scored_by_environment(made, Scored(1.0, info={"acc": 1.0}), FAILED, Scored(1.0), Scored(1.0))
    assert scores.answered.tolist() == [True, False, True, True]
    assert [value == value for value in scores.recorded] == [True, False, True, True]
    failed = {"rollout/failed": 0.25, "rollout/failed/environment_error": 0.25, "reward/info/acc": 1.0}
    assert scores.metrics.items() >= failed.items()
    assert scores.metrics["rollout/informative_fraction"] == 0  # a failure is no lower score
    made.close()


def test_metrics_count_further_attempts_by_cause() -> None:
    rewards = FakeRewards()
    rewards.told.set()
    made = collector(rewards)
    retried = Scored(1.0, retried=("reward_server", "reward_timeout"))
    scores = scored_by_environment(made, retried, FAILED, Scored(1.0), Scored(1.0, retried=("reward_server",)))
    assert {name: value for name, value in scores.metrics.items() if "retried" in name} == {
        "rollout/retried/reward_server": 0.5,
        "rollout/retried/reward_timeout": 0.25,
    }
    made.close()


class PassingRewards(FakeRewards):
    """The ground truth of a response lists what becomes of each attempt to score it: causes, then the score."""

    def __init__(self) -> None:
        super().__init__()
        self.told.set()
        self.asked: Counter[str] = Counter()

    def attempt(
        self, tasks: Mapping[int, Task[Scorer, list[Scored]]], _timeout: float
    ) -> tuple[dict[int, list[Scored]], dict[int, WorkerError]]:
        return {
            rank: [self._score(answer.ground_truth) for answer in task.arguments[0]] for rank, task in tasks.items()
        }, {}

    def _score(self, ends: str) -> Scored:
        end = ends.split()[min(self.asked[ends], len(ends.split()) - 1)]
        self.asked[ends] += 1
        return Scored(float(end)) if end[0].isdigit() else Scored(0.0, f"{end}!", cause=end)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ends", "retries", "value", "cause", "asked"),
    [
        ("1", 2, 1.0, None, 1),
        ("reward_timeout 1", 1, 1.0, None, 2),
        ("reward_server reward_sandbox 1", 2, 1.0, None, 3),
        ("reward_server reward_sandbox 1", 1, 0.0, "reward_sandbox", 2),
        ("reward_server 1", 0, 0.0, "reward_server", 1),
        ("reward_error 1", 3, 0.0, "reward_error", 1),  # the same function raises again
    ],
)
def test_a_reward_that_may_pass_is_computed_again_for_the_same_response(
    ends: str, retries: int, value: float, cause: str | None, asked: int
) -> None:
    rewards = PassingRewards()
    config = Config.model_validate({"model": {"path": "/nowhere"}, "rollout": {"retries": retries}})
    group: Any = rewards
    answers = [Answer("a", "2"), Answer("b", ends), Answer("c", "3")]
    first, score, last = RewardWorkers(group, config).score(answers, [0, 1, 2])
    assert (first.value, last.value) == (2.0, 3.0)
    assert (score.value, score.cause, len(score.retried)) == (value, cause, asked - 1)
    assert rewards.asked[ends] == asked
    assert rewards.asked["2"] == rewards.asked["3"] == 1


def test_failures_of_rewards_may_have_a_limit_of_their_own() -> None:
    config = Config.model_validate({"reward": {"max_failed_share": 0.0}})
    raised = Scored(0.0, "KeyError: 'x'", cause="reward_error")
    check_failed_shares([FAILED, FAILED, Scored(1.0), Scored(1.0)], config)
    with pytest.raises(FailedResponsesError, match=r"1 of 4 .* more than reward.max_failed_share=0 allows"):
        check_failed_shares([FAILED, raised, Scored(1.0), Scored(1.0)], config)
    with pytest.raises(FailedResponsesError, match=r"3 of 4 .* more than rollout.max_failed_share=0.5 allows"):
        check_failed_shares([FAILED, FAILED, FAILED, Scored(1.0)], config)


def validated(made: Collector, *scores: Scored) -> dict[str, float]:
    """The metrics of a validation whose environment gives these scores."""
    prompts = [Prompt(row, (1,), "", "games", "") for row in range(len(scores))]
    rows = [Trajectory((1,), 0.0, 0, 4, token_ids=[3], mask=[True], scored=score) for score in scores]
    made.data = replace(made.data, validation=prompts)  # type: ignore[arg-type]
    methods = {"begin": lambda *_, **__: rows, "finish": lambda *_: None, "close": lambda _: None}
    played: Any = type("Played", (), methods)()
    made.conversations = played
    return made.validate().metrics


def test_a_failed_response_is_in_no_metric_of_the_validation_but_is_counted() -> None:
    rewards = FakeRewards()
    rewards.told.set()
    made = collector(rewards)
    metrics = validated(made, Scored(1.0), FAILED, Scored(0.0), FAILED)
    assert metrics == {
        "validation/failed": 0.5,
        "validation/failed/environment_error": 0.5,
        "validation/exact_match": 0.5,
        "validation/games/mean@1": 0.5,
    }
    made.close()


def test_a_validation_in_which_everything_fails_measures_nothing_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    rewards = FakeRewards()
    rewards.told.set()
    made = collector(rewards)
    assert validated(made, FAILED, FAILED) == {"validation/failed": 1.0, "validation/failed/environment_error": 1.0}
    message = "2 of 2 responses of the validation failed, so it measures nothing; first failure: environment: it died"
    assert message in caplog.text
    made.close()


def test_with_a_failure_score_a_failed_response_is_an_answer_with_that_score() -> None:
    rewards = FakeRewards()
    rewards.told.set()
    made = collector(rewards, failure_score=0.0)
    scores = scored_by_environment(made, Scored(1.0), FAILED, Scored(1.0), Scored(1.0))
    assert scores.answered.all()
    assert scores.recorded == [1.0, 0.0, 1.0, 1.0]
    assert scores.metrics["rollout/failed"] == 0.25
    assert scores.metrics["rollout/informative_fraction"] == 1
    made.close()


def test_a_run_stops_when_too_many_responses_of_a_step_fail() -> None:
    rewards = FakeRewards()
    rewards.told.set()
    made = collector(rewards)
    raised = Scored(0.0, "KeyError: 'x'", traceback="Traceback: line 3\n", cause="reward_error")
    scored_by_environment(made, FAILED, FAILED, Scored(1.0), Scored(0.0))  # half of them may
    with pytest.raises(FailedResponsesError) as caught:
        scored_by_environment(made, raised, FAILED, raised, Scored(0.0))
    message = (
        "3 of 4 responses of a step failed (2 reward_error, 1 environment_error), more than "
        "rollout.max_failed_share=0.5 allows; first failure: KeyError: 'x'\n\nTraceback: line 3"
    )
    assert (str(caught.value), caught.value.exit_code) == (message, 6)
    made.close()


def test_the_age_of_weights_is_a_mean_over_sampled_tokens() -> None:
    of_one_version = Trajectory((1,), 1.0, 0, 4, token_ids=[3, 4, 5], mask=[True, False, True], versions=[2, 2, 2])
    of_two = Trajectory((1,), 1.0, 0, 4, token_ids=[3, 4, 5], mask=[True, False, True], versions=[2, 3, 3])
    experience = Experience([], [of_one_version, of_two], completed(Scores(torch.zeros(2), {})))
    means = {"rollout/staleness_mean": 1.75, "rollout/staleness_max": 2.0}
    assert experience.staleness(version=4, shares=False) == means
    by_age = {"rollout/staleness/1": 0.25, "rollout/staleness/2": 0.75}
    assert experience.staleness(version=4, shares=True) == means | by_age
    oldest = {"rollout/staleness_mean": 99.75, "rollout/staleness_max": 100.0, "rollout/staleness/8": 1.0}
    assert experience.staleness(version=102, shares=True) == oldest


def test_a_greedy_baseline_is_penalised_for_its_length_as_a_sampled_response_is() -> None:
    """Played conversations, because there is no engine: the second greedy response has the maximum length."""
    rewards = FakeRewards()
    rewards.told.set()
    made = collector(rewards, overlong_buffer=8, overlong_penalty=1.0)
    longest = made.config.data.max_response_length
    rows = [Trajectory((1,), 0.0, 0, longest, token_ids=[3] * length, mask=[True] * length) for length in (2, longest)]
    methods = {"begin": lambda *_, **__: rows, "finish": lambda *_: None, "close": lambda _: None}
    played: Any = type("Played", (), methods)()
    made.conversations = played
    prompts = [Prompt(row, (1,), "1", "", "") for row in range(2) for _ in range(made.samples)]
    scores, left_out = made.greedy_scores(prompts)
    assert scores.tolist() == [1.0] * made.samples + [0.0] * made.samples
    assert not left_out.any()
    made.close()


def test_metrics_name_data_sources_and_further_numbers() -> None:
    rewards = FakeRewards()
    made = collector(rewards)
    prompts = [Prompt(row, (1,), "1", source, "") for row, source in enumerate(["a", "b", "b"])]
    rows = [Trajectory((1,), 1.0, 0, 4)] * 3
    scored = [Scored(1.0, info={"acc": 1.0}), Scored(0.0), Scored(0.5, info={"acc": 0.0})]
    metrics = made.summarized(prompts, rows, scored).metrics
    assert (metrics["reward/source/a"], metrics["reward/source/b"], metrics["reward/info/acc"]) == (1.0, 0.25, 0.5)
    assert not any("source" in name for name in made.summarized(prompts[1:], rows[1:], scored[1:]).metrics)
    made.close()


@pytest.mark.parametrize(("items", "count"), [(7, 3), (2, 4), (0, 2), (8, 2)])
def test_split_keeps_everything_in_order(items: int, count: int) -> None:
    parts = split(range(items), count)
    assert [item for part in parts for item in part] == list(range(items))
    assert len(parts) == count
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
