"""Metrics of validation with several responses to each prompt."""

from collections import Counter

import numpy as np
import pytest

from trainer.config.sections.reward import RewardConfig
from trainer.experience.validation import prompt_metrics, validation_metrics
from trainer.rewards.answer import Answer, Scored
from trainer.rewards.function import reward_function
from trainer.rewards.scores import as_scored

REWARDS = [0.0, 1.0, 0.5, 0.0, 1.0, 0.25]
ANSWERS = ["7", "8", "9", "7", "8", "7"]


def test_best_and_majority_are_a_bootstrap_over_the_responses() -> None:
    """The definition, drawn one by one with verl's generator and seed."""
    metrics = prompt_metrics(REWARDS, list(ANSWERS))
    assert metrics["mean@6"] == pytest.approx(np.mean(REWARDS))
    assert metrics["std@6"] == pytest.approx(np.std(REWARDS))
    for size in (2, 4, 6):
        draws = np.random.RandomState(42).choice(6, size=(1000, size), replace=True)
        best = [max(REWARDS[row] for row in draw) for draw in draws]
        worst = [min(REWARDS[row] for row in draw) for draw in draws]
        voted = []
        for draw in draws:
            (winner, _), *_ = Counter(ANSWERS[row] for row in draw).most_common(1)
            voted.append(next(REWARDS[row] for row in draw if ANSWERS[row] == winner))
        for name, values in {"best": best, "worst": worst, "maj": voted}.items():
            assert metrics[f"{name}@{size}/mean"] == pytest.approx(np.mean(values))
            assert metrics[f"{name}@{size}/std"] == pytest.approx(np.std(values))
    assert len(metrics) == 2 + 3 * 6


def test_a_single_greedy_response_has_a_mean_only() -> None:
    assert prompt_metrics([0.5], [None]) == {"mean@1": 0.5}


def test_no_majority_where_a_response_has_no_answer_from_the_rule() -> None:
    assert not [name for name in prompt_metrics([0.0, 1.0], ["7", None]) if name.startswith("maj")]


def test_sources_are_separate_and_each_prompt_counts_once() -> None:
    rewards = {"math": [(1.0, 0.0), (1.0, 1.0)], "code": [(0.0, 0.0)]}
    sources = [source for source, prompts in rewards.items() for _ in prompts for _ in range(2)]
    scored = [
        Scored(value, info={"acc": 2 * value}) for prompts in rewards.values() for both in prompts for value in both
    ]
    metrics = validation_metrics(sources, scored, samples=2, left_out=[False] * len(scored))
    assert metrics["validation/math/mean@2"] == 0.75
    assert metrics["validation/code/mean@2"] == 0.0
    assert metrics["validation/math/acc/mean@2"] == 1.5
    assert metrics["validation/math/std@2"] == 0.25


def test_a_prompt_with_a_failed_response_is_in_no_metric() -> None:
    scored = [Scored(1.0), Scored(0.0, cause="reward_error"), Scored(1.0), Scored(0.5)]
    metrics = validation_metrics(["a"] * 4, scored, samples=2, left_out=[False, True, False, False])
    assert metrics["validation/a/mean@2"] == 0.75


def test_rules_and_functions_return_the_answer_that_votes() -> None:
    answer = Answer("2 + 2 #### 4", "4", "openai/gsm8k")
    assert as_scored(reward_function(RewardConfig())(answer), answer) == Scored(1.0, pred="4")
    assert as_scored({"score": 1, "pred": 4, "acc": 1}, answer) == Scored(1.0, info={"acc": 1.0}, pred="4")
