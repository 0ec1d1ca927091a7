"""Advantages without a critic, each against a loop over plain numbers."""

import statistics
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from tests.trainer.tensors import normal, random_mask, seeds
from trainer.algorithms.advantages.gpg import gpg
from trainer.algorithms.advantages.grpo import grpo
from trainer.algorithms.advantages.grpo_passk import grpo_passk
from trainer.algorithms.advantages.opo import opo
from trainer.algorithms.advantages.reinforce_plus_plus import reinforce_plus_plus
from trainer.algorithms.advantages.reinforce_plus_plus_baseline import reinforce_plus_plus_baseline
from trainer.algorithms.advantages.remax import remax
from trainer.algorithms.advantages.rloo import rloo
from trainer.algorithms.dapo import informative_groups, overlong_penalty

ROWS, TOKENS = 6, 5


def slow_grpo(score: float, group: Sequence[float], divide: bool) -> float:
    if len(group) == 1:
        return score
    return (score - statistics.fmean(group)) / (statistics.stdev(group) + 1e-6 if divide else 1.0)


def slow_rloo(score: float, group: Sequence[float]) -> float:
    others = list(group)
    others.remove(score)
    return score - statistics.fmean(others) if others else score


def slow_passk(score: float, group: Sequence[float], divide: bool) -> float:
    best = sorted(group)
    if len(group) == 1 or score != best[-1]:
        return 0.0
    return (best[-1] - best[-2]) / (statistics.stdev(group) + 1e-6 if divide else 1.0)


def sampled_rewards(seed: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Rewards, 0 where the policy did not choose the token, and the mask of the tokens that it chose."""
    mask = random_mask(seed, rows, TOKENS)
    return normal(seed, rows, TOKENS).where(mask, 0.0), mask


def slow_rewards_to_go(rewards: Sequence[float], gamma: float) -> list[float]:
    return [sum(gamma ** (k - t) * rewards[k] for k in range(t, len(rewards))) for t in range(len(rewards))]


@pytest.mark.parametrize(
    ("fast", "slow"),
    [
        (lambda r, m, g: grpo(r, m, g, divide_by_std=True), lambda score, group: slow_grpo(score, group, True)),
        (lambda r, m, g: grpo(r, m, g, divide_by_std=False), lambda score, group: slow_grpo(score, group, False)),
        (rloo, slow_rloo),
        (lambda r, m, g: grpo_passk(r, m, g, divide_by_std=True), lambda score, group: slow_passk(score, group, True)),
        (
            lambda r, m, g: grpo_passk(r, m, g, divide_by_std=False),
            lambda score, group: slow_passk(score, group, False),
        ),
    ],
    ids=["grpo", "grpo without std", "rloo", "grpo_passk", "grpo_passk without std"],
)
@given(seed=seeds, groups=st.lists(st.integers(0, 2), min_size=ROWS, max_size=ROWS))
def test_a_response_is_compared_with_its_group(
    fast: Callable[[Tensor, Tensor, Tensor], Tensor],
    slow: Callable[[float, Sequence[float]], float],
    seed: int,
    groups: list[int],
) -> None:
    rewards, mask = sampled_rewards(seed)
    scores = [sum(row.tolist()) for row in rewards]
    mask[-1] = False  # a response that does not train is still compared with
    advantages = fast(rewards, mask, torch.tensor(groups))
    for row in range(ROWS):
        group = [score for score, number in zip(scores, groups, strict=True) if number == groups[row]]
        expected = torch.full((TOKENS,), slow(scores[row], group), dtype=torch.float64).where(mask[row], 0.0)
        assert_close(advantages[row], expected, atol=1e-6, rtol=1e-6)


@given(seed=seeds, gamma=st.floats(0, 1))
def test_reinforce_plus_plus_whitens_discounted_future_rewards(seed: int, gamma: float) -> None:
    rewards, mask = normal(seed, 4, TOKENS), random_mask(seed, 4, TOKENS)
    to_go = [slow_rewards_to_go(row[chosen].tolist(), gamma) for row, chosen in zip(rewards, mask, strict=True)]
    flat = [value for row in to_go for value in row]
    mean, spread = statistics.fmean(flat), statistics.stdev(flat)
    advantages = reinforce_plus_plus(rewards, mask, gamma)
    expected = torch.tensor([(value - mean) / spread for value in flat], dtype=torch.float64)
    assert_close(advantages[mask], expected, atol=1e-5, rtol=1e-5)
    assert (advantages[~mask] == 0).all()


@given(seed=seeds)
def test_reinforce_plus_plus_baseline_whitens_the_distance_to_the_group(seed: int) -> None:
    (rewards, mask), groups = sampled_rewards(seed), [0, 0, 0, 1, 1, 1]
    scores = [sum(row.tolist()) for row in rewards]
    apart = [
        score - statistics.fmean(scores[i] for i in range(ROWS) if groups[i] == groups[row])
        for row, score in enumerate(scores)
    ]
    flat = [apart[row] for row, _ in mask.nonzero().tolist()]
    advantages = reinforce_plus_plus_baseline(rewards, mask, torch.tensor(groups))
    expected = [(value - statistics.fmean(flat)) / statistics.stdev(flat) for value in flat]
    assert_close(advantages[mask], torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=1e-6)


def test_opo_weights_the_baseline_by_length() -> None:
    mask = torch.tensor([[True, True, True], [True, False, False]])
    rewards = torch.tensor([[0.0, 0.0, 1.0], [5.0, 0.0, 0.0]])
    assert_close(opo(rewards, mask, torch.tensor([0, 0])), torch.tensor([[-1.0] * 3, [3.0, 0.0, 0.0]]))


@pytest.mark.parametrize("estimate", [rloo, opo, partial(grpo, divide_by_std=True), partial(grpo, divide_by_std=False)])
def test_the_advantage_of_a_response_alone_in_its_group_is_its_score(
    estimate: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> None:
    mask, rewards = torch.ones(3, 2, dtype=torch.bool), torch.tensor([[0.0, 3.0], [0.0, 0.5], [0.0, 0.5]])
    assert_close(estimate(rewards, mask, torch.tensor([0, 1, 2])), torch.tensor([[3.0] * 2, [0.5] * 2, [0.5] * 2]))


def test_gpg_makes_up_for_responses_without_reward() -> None:
    mask, rewards = torch.ones(4, 1, dtype=torch.bool), torch.tensor([[1.0], [0.0], [0.0], [0.0]])
    assert_close(gpg(rewards, mask, torch.tensor([0, 0, 1, 1])), 4 * torch.tensor([[0.5], [-0.5], [0.0], [0.0]]))


@given(seed=seeds)
def test_remax_subtracts_the_greedy_score_from_future_rewards(seed: int) -> None:
    rewards, mask, greedy = normal(seed, 4, TOKENS), random_mask(seed, 4, TOKENS), normal(seed + 1, 4)
    advantages = remax(rewards, mask, greedy)
    for row in range(4):
        to_go = slow_rewards_to_go(rewards[row, mask[row]].tolist(), 1.0)
        expected = torch.tensor([value - greedy[row].item() for value in to_go], dtype=torch.float64)
        assert_close(advantages[row, mask[row]], expected)
    assert (advantages[~mask] == 0).all()


@given(seed=seeds)
def test_masked_tokens_padding_and_the_order_of_rows_change_nothing(seed: int) -> None:
    (rewards, mask), greedy = sampled_rewards(seed), normal(seed + 1, ROWS)
    groups = torch.arange(ROWS) // 2
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed))

    def all_of(r: Tensor, m: Tensor, g: Tensor, best: Tensor) -> Tensor:
        return torch.stack(
            [
                grpo(r, m, g, True),
                grpo(r, m, g, False),
                rloo(r, m, g),
                gpg(r, m, g),
                opo(r, m, g),
                grpo_passk(r, m, g, True),
                reinforce_plus_plus_baseline(r, m, g),
                reinforce_plus_plus(r, m, 0.9),
                remax(r, m, best),
            ]
        )

    clean = all_of(rewards, mask, groups, greedy)
    padded = (torch.nn.functional.pad(tensor, (0, 3)) for tensor in (rewards, mask))
    assert_close(all_of(*padded, groups, greedy)[..., :TOKENS], clean)
    assert_close(all_of(rewards[order], mask[order], groups[order], greedy[order]), clean[:, order])


def test_prompts_whose_responses_differ_in_score_are_informative() -> None:
    scores, groups = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0]), torch.tensor([0, 0, 1, 1, 2, 2])
    assert informative_groups(scores, groups).tolist() == [True, True, False, False, False, False]


def test_responses_are_penalised_from_the_start_of_the_buffer() -> None:
    lengths = torch.tensor([1, 80, 90, 95, 100])
    penalty = overlong_penalty(lengths, max_length=100, buffer=20, factor=0.5)
    assert_close(penalty, torch.tensor([0.0, 0.0, -0.25, -0.375, -0.5]))
