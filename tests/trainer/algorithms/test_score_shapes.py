"""Baselines of single tokens, advantages from components of the reward, and resampling by score."""

import pytest
import torch
from torch.testing import assert_close

from trainer.algorithms.advantages.gdpo import ROW, gdpo
from trainer.algorithms.advantages.optimal_token_baseline import optimal_token_baseline
from trainer.algorithms.resampling import resampled_rows
from trainer.algorithms.rows import Sampled
from trainer.errors import RewardError

GROUP = torch.tensor([0, 0])


def test_the_baseline_of_a_token_weights_returns_by_the_energy_so_far() -> None:
    # Squared gradient lengths 1 - 2 p + sum p^2: row 0 has 0.5 and 0.3, row 1 has 0.2 and 1.0, so W is 0.5, 0.8 and
    # 0.2, 1.2. Returns are 1, 1 and 3, 2: B = (0.5 + 0.6) / 0.7 and (0.8 + 2.4) / 2.
    rewards = torch.tensor([[0.0, 1.0], [1.0, 2.0]])
    mask = torch.ones(2, 2, dtype=torch.bool)
    p = torch.tensor([[0.5, 0.6], [0.8, 0.2]])
    squares = torch.tensor([[0.5, 0.5], [0.8, 0.4]])
    advantages = optimal_token_baseline(rewards, mask, GROUP, p.log(), squares, None, zero_tail=False)
    assert_close(advantages, torch.tensor([[1 - 1.1 / 0.7, 1 - 1.6], [3 - 1.1 / 0.7, 2 - 1.6]]), atol=1e-5, rtol=1e-5)


def test_weights_of_a_correction_enter_the_energy_squared() -> None:
    rewards = torch.tensor([[1.0], [3.0]])
    mask, squares = torch.ones(2, 1, dtype=torch.bool), torch.tensor([[0.0], [0.0]])
    p = torch.tensor([[0.25], [0.25]])  # both lengths are 0.5, with the weights 2 and 1 the energies 2 and 0.5
    advantages = optimal_token_baseline(rewards, mask, GROUP, p.log(), squares, torch.tensor([[2.0], [1.0]]), False)
    assert_close(advantages, torch.tensor([[1 - 3.5 / 2.5], [3 - 3.5 / 2.5]]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("zero_tail", "last"), [(True, 2.0), (False, 0.0)])
def test_where_only_the_longest_response_is_left_it_has_no_baseline(zero_tail: bool, last: float) -> None:
    mask = torch.tensor([[True, True], [True, False]])
    rewards, p = torch.tensor([[0.0, 2.0], [1.0, 0.0]]), torch.full((2, 2), 0.25)
    advantages = optimal_token_baseline(rewards, mask, GROUP, p.log(), torch.zeros(2, 2), None, zero_tail)
    assert_close(advantages, torch.tensor([[0.5, last], [-0.5, 0.0]]), atol=1e-5, rtol=1e-5)


def test_tool_output_between_turns_does_not_move_the_place_where_only_one_response_is_left() -> None:
    mask = torch.tensor([[1, 1, 0, 0, 1, 1], [1, 1, 0, 0, 1, 0]]).bool()
    rewards, p = torch.zeros(2, 6), torch.full((2, 6), 0.25)
    rewards[0, 5], rewards[1, 4] = 2.0, 1.0
    advantages = optimal_token_baseline(rewards, mask, GROUP, p.log(), torch.zeros(2, 6), None, zero_tail=True)
    assert_close(advantages[0], torch.tensor([0.5, 0.5, 0.0, 0.0, 0.5, 2.0]), atol=1e-5, rtol=1e-5)


def test_a_response_alone_in_its_group_keeps_its_return() -> None:
    mask, p = torch.ones(2, 1, dtype=torch.bool), torch.full((2, 1), 0.25)
    rewards = torch.tensor([[4.0], [5.0]])
    advantages = optimal_token_baseline(rewards, mask, torch.tensor([0, 1]), p.log(), torch.zeros(2, 1), None, True)
    assert_close(advantages, rewards)


def test_components_are_normalised_before_they_are_added() -> None:
    # Normalised in their group, both components are a permutation of (2, -1, -1) / sqrt(3), whatever their scale. The
    # sum has mean 0 and variance 1 already.
    mask, group = torch.ones(3, 1, dtype=torch.bool), torch.tensor([0, 0, 0])
    components = [torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, 0.0, 100.0])]
    advantages = gdpo(components, [1.0, 1.0], mask, group, divide_by_std=True)
    assert_close(advantages, torch.tensor([[1.0], [-2.0], [1.0]]) / 3**0.5, atol=1e-4, rtol=1e-4)
    # Weights 1 and 0 leave (2, -1, -1) / sqrt(3), of variance 1.
    first = gdpo(components, [1.0, 0.0], mask, group, divide_by_std=True)
    assert_close(first, torch.tensor([[2.0], [-1.0], [-1.0]]) / 3**0.5, atol=1e-4, rtol=1e-4)


def test_a_component_that_no_rule_returns_is_refused_by_name() -> None:
    mask = torch.ones(2, 1, dtype=torch.bool)
    sampled = Sampled(torch.zeros(2, 1), mask, GROUP, components={"score": torch.zeros(2), "format": torch.ones(2)})
    with pytest.raises(RewardError, match="number accuracy") as caught:
        ROW.estimate(sampled, reward_components=["format", "accuracy"], component_weights=[], divide_by_std=True)
    assert "score, format" in caught.value.hint


@pytest.mark.parametrize(
    ("resampling", "shares"),
    [
        ("power", [1 / 14, 4 / 14, 9 / 14, 0.0]),  # |R|^2 of 1, -2, 3, 0
        ("max_min", [0.0, 0.5, 0.5, 0.0]),
        ("max_random", [1 / 7, 1 / 7, 4 / 7, 1 / 7]),
    ],
)
def test_responses_are_drawn_in_proportion_to_their_scores(resampling: str, shares: list[float]) -> None:
    scores = torch.tensor([1.0, -2.0, 3.0, 0.0])
    generator = torch.Generator().manual_seed(0)
    drawn = torch.cat([resampled_rows(scores, resampling, 2.0, generator) for _ in range(4000)])  # type: ignore[arg-type]
    assert len(drawn) == 4 * 4000
    frequencies = drawn.bincount(minlength=4) / len(drawn)
    assert_close(frequencies, torch.tensor(shares), atol=0.015, rtol=0)


def test_the_same_generator_draws_the_same_rows() -> None:
    scores = torch.tensor([1.0, 2.0, 3.0])
    first, second = (resampled_rows(scores, "power", 1.0, torch.Generator().manual_seed(7)) for _ in range(2))
    assert first.tolist() == second.tolist()
