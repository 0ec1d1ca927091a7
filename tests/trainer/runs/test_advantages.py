"""From the scores of a step to what its rows learn."""

import math
from typing import Any

import pytest
import torch

from trainer.algorithms.registry import ESTIMATORS
from trainer.algorithms.token_rewards import move_to_tokens, token_rewards
from trainer.config.tree import Config
from trainer.data.batches.batch import Batch
from trainer.data.dataset import Prompt, PromptSampler
from trainer.experience.collector import Collector, Experience, Scores, completed
from trainer.experience.run_data import RunData
from trainer.experience.trajectory import Trajectory
from trainer.models.small import build_tokenizer
from trainer.runs.advantages import Estimated, resampled, with_advantages


def estimated(lengths: list[int], kls: list[float], scores: Scores, samples: int, **algorithm: object) -> Estimated:
    """The step of responses with these lengths and KL per token."""
    batch, experience = responses(lengths, scores)
    reference = torch.zeros(batch.response_mask.shape)
    batch = batch.with_(
        reference_log_probs=reference,
        old_log_probs=reference + torch.tensor(kls).unsqueeze(1),
        squared_probabilities=reference + 0.3,
        values=reference + torch.arange(reference.shape[1]) / 16,
    )
    return with_advantages(batch, experience, scores, without_engines(samples, **algorithm), 0.2)


def without_engines(samples: int, **algorithm: object) -> Collector:
    config = Config.model_validate(
        {
            "model": {"path": "/nowhere"},
            "algorithm": algorithm,
            "rollout": {"samples_per_prompt": samples},
            "actor": {"mini_batch_size": samples},
            "critic": {"mini_batch_size": samples},
        }
    )
    nothing: Any = None  # without engines, reward workers and prompts
    data = RunData(build_tokenizer(["1 2 3"]), nothing, nothing, PromptSampler(4, 4, shuffle=False, seed=0))
    return Collector(config, nothing, nothing, data)


def responses(lengths: list[int], scores: Scores) -> tuple[Batch, Experience]:
    prompts = [Prompt(row, (1, 2), "", "", "") for row in range(len(lengths))]
    rows = [Trajectory((1, 2), 1.0, 0, 4, token_ids=[3] * n, mask=[True] * n) for n in lengths]
    batch = Batch.from_responses([(1, 2)] * len(rows), [row.token_ids for row in rows], None)
    return batch, Experience(prompts, rows, completed(scores))


def test_adaptive_control_compares_the_mean_over_responses_with_its_target() -> None:
    """verl averages each response first: 0.2 over 10 tokens and 0.02 over 1,000 are 0.11, above a target of 0.1."""
    control = {"advantage": "reinforce_plus_plus", "kl_control": "adaptive", "kl_target": 0.1, "kl_horizon": 100}
    step = estimated([10, 1000], [0.2, 0.02], Scores(torch.ones(2), {}), samples=2, **control)
    assert step.metrics["reference/kl_by_response"] == pytest.approx(0.11)
    assert step.metrics["reference/kl"] == pytest.approx((2.0 + 20.0) / 1010)
    assert step.kl_coefficient == pytest.approx(0.2 * (1 + 0.1 * 2 / 100))


@pytest.mark.parametrize("advantage", ["grpo", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline"])
def test_equal_scores_of_a_step_teach_nothing_whichever_turns_earned_them(advantage: str) -> None:
    count = 64
    turns = [[(0, 0.1 * (row % 7)), (1, -1.3 * row)] for row in range(count)]
    scores = Scores(torch.full((count,), 1.1), {}, by_token=turns)
    step = estimated([3 + row % 5 for row in range(count)], [0.0] * count, scores, samples=count, advantage=advantage)
    assert step.batch.advantages is not None
    assert step.batch.advantages.dtype == torch.float32
    assert (step.batch.advantages == 0).all()


@pytest.mark.parametrize("advantage", sorted(ESTIMATORS))
def test_a_step_with_failures_teaches_what_it_would_teach_without_them(advantage: str) -> None:
    """The last two responses to each prompt fail: the others learn as in a step that has only them."""
    values = torch.tensor([1.0, 0.0, 0.5, 0.0, 0.0, 2.0, 0.0, 0.25, 0.0, 0.0])
    lengths = [3, 5, 4, 9, 1, 2, 6, 3, 8, 2]
    answered = torch.tensor([True, True, True, False, False] * 2)
    kept = answered.nonzero().squeeze(1)
    algorithm: dict[str, object] = {"advantage": advantage}
    if advantage == "gdpo":
        algorithm |= {"reward_components": ["score"], "kl_coefficient": 0.0}
    greedy = torch.full((10,), 0.5)
    whole = estimated(
        lengths,
        [0.0] * 10,
        Scores(values, {}, greedy, parts=[{}] * 10, left_out=~answered),
        5,
        **algorithm,
    )
    alone = estimated(
        [lengths[row] for row in kept],
        [0.0] * 6,
        Scores(values[kept], {}, greedy[kept], parts=[{}] * 6),
        3,
        **algorithm,
    )
    assert not whole.batch.response_mask[~answered].any()
    assert whole.batch.advantages is not None
    assert alone.batch.advantages is not None
    width = alone.batch.advantages.shape[1]
    assert torch.equal(whole.batch.advantages[kept][:, :width], alone.batch.advantages)
    assert (whole.batch.advantages[~answered] == 0).all()
    if advantage == "gae":
        assert whole.batch.returns is not None
        assert alone.batch.returns is not None
        assert torch.equal(whole.batch.returns[kept][:, :width], alone.batch.returns)
    assert whole.metrics["reward/mean"] == alone.metrics["reward/mean"]
    assert whole.metrics["rollout/dropped_groups"] == 0


@pytest.mark.parametrize("advantage", ["grpo", "rloo", "grpo_passk"])
def test_a_group_with_a_single_answer_is_left_out(advantage: str) -> None:
    left_out = torch.tensor([False, True, True, False, False, True])
    scores = Scores(torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 0.0]), {}, left_out=left_out)
    step = estimated([2] * 6, [0.0] * 6, scores, 3, advantage=advantage)
    assert step.batch.response_mask.any(dim=1).tolist() == [False, False, False, True, True, False]
    assert step.batch.responses == 2  # no mean over responses divides by the others
    assert step.metrics["rollout/dropped_groups"] == 1
    assert step.metrics["reward/mean"] == pytest.approx(2 / 3)


def test_without_any_group_of_two_answers_nothing_trains() -> None:
    scores = Scores(torch.tensor([1.0, 0.0]), {}, left_out=torch.tensor([False, True]))
    step = estimated([2, 2], [0.0, 0.0], scores, 2, advantage="grpo")
    assert not step.batch.response_mask.any()
    assert step.batch.advantages is not None
    assert (step.batch.advantages == 0).all()
    assert step.metrics["rollout/dropped_groups"] == 1


def test_a_step_without_any_answer_has_no_mean_reward() -> None:
    """A mean over nothing would not be a number, in a column of numbers."""
    failed = Scores(torch.zeros(2), {}, left_out=torch.ones(2, dtype=torch.bool))
    step = estimated([3, 3], [0.1, 0.1], failed, samples=2, advantage="grpo")
    assert "reward/mean" not in step.metrics
    assert all(map(math.isfinite, step.metrics.values()))


def test_a_failed_response_is_never_resampled() -> None:
    values, left_out = torch.tensor([0.5, 9.0, 0.5, 9.0]), torch.tensor([False, True, False, True])
    collector = without_engines(2, advantage="gae", resampling="power")
    batch, experience = responses([1, 2, 3, 4], Scores(values, {}, left_out=left_out))
    drawn = resampled(batch, experience, experience.scores.result(), collector, 1)
    assert len(drawn) == 4
    assert {int(length) for length in drawn.lengths} <= {3, 5}


def test_the_score_is_given_at_the_last_token() -> None:
    mask = torch.tensor([[True, True, False], [True, True, True], [True, False, False]])
    kl = torch.full((3, 3), 0.5)
    rewards = token_rewards(torch.tensor([1.0, 0.0, 2.0]), kl, mask, kl_coefficient=0.1)
    expected = [[-0.05, 0.95, 0.0], [-0.05, -0.05, -0.05], [1.95, 0.0, 0.0]]
    torch.testing.assert_close(rewards, torch.tensor(expected))


def test_parts_of_a_score_move_to_the_sampled_tokens_that_earned_them() -> None:
    mask = torch.tensor([[True, False, True, True], [True, True, False, False]])
    rewards = torch.tensor([[0.0, 0.0, 0.0, 2.0], [0.0, 1.0, 0.0, 0.0]])
    move_to_tokens(rewards, [[(0, 0.5), (1, 0.25), (2, 1.0)], []], mask)
    torch.testing.assert_close(rewards, torch.tensor([[0.5, 0.0, 0.25, 1.25], [0.0, 1.0, 0.0, 0.0]]))
