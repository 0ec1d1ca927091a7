"""From the scores of a step to what its rows learn."""

from typing import Any

import pytest
import torch

from trainer.algorithms.token_rewards import move_to_tokens, token_rewards
from trainer.config.tree import Config
from trainer.data.batches.batch import Batch
from trainer.data.dataset import Prompt, PromptSampler
from trainer.experience.collector import Collector, Experience, Scores, completed
from trainer.experience.run_data import RunData
from trainer.experience.trajectory import Trajectory
from trainer.models.small import build_tokenizer
from trainer.runs.advantages import Estimated, with_advantages


def estimated(lengths: list[int], kls: list[float], scores: Scores, samples: int, **algorithm: object) -> Estimated:
    """The step of responses with these lengths and KL per token."""
    config = Config.model_validate(
        {"model": {"path": "/nowhere"}, "algorithm": algorithm, "rollout": {"samples_per_prompt": samples}}
    )
    nothing: Any = None  # without engines, reward workers and prompts
    data = RunData(build_tokenizer(["1 2 3"]), nothing, nothing, PromptSampler(4, 4, shuffle=False, seed=0))
    collector = Collector(config, nothing, nothing, data)
    prompts = [Prompt(row, (1, 2), "", "", "") for row in range(len(lengths))]
    rows = [Trajectory((1, 2), 1.0, 0, 4, token_ids=[3] * n, mask=[True] * n) for n in lengths]
    experience = Experience(prompts, rows, completed(scores))
    batch = Batch.from_responses([(1, 2)] * len(rows), [row.token_ids for row in rows], None)
    reference = torch.zeros(batch.response_mask.shape)
    batch = batch.with_(reference_log_probs=reference, old_log_probs=reference + torch.tensor(kls).unsqueeze(1))
    return with_advantages(batch, experience, scores, collector, 0.2)


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
