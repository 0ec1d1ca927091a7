"""Equal scores give exactly no advantage, whatever their value, their number, and the tokens that earned them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.trainer.tensors import random_mask, seeds
from trainer.algorithms.advantages.gdpo import gdpo
from trainer.algorithms.losses.covariance import covariances
from trainer.algorithms.registry import ESTIMATORS
from trainer.algorithms.returns import explained_variance, whiten
from trainer.algorithms.rows import Sampled
from trainer.algorithms.token_rewards import move_to_tokens, token_rewards
from trainer.experience.validation import prompt_metrics

scores = st.floats(-1e6, 1e6) | st.sampled_from([0.1, 0.7, 0.9, 1.1, 1 / 3, 1e-3, 1e30, -2.2])
turns = st.floats(-100, 100).map(lambda reward: round(reward, 4)) | st.sampled_from([0.1, 0.3, 1 / 3, -2.2])
sizes = st.integers(2, 256)
TOKENS = 5
# An advantage estimator of `reinforce_plus_plus` and `gae` compares tokens of the whole batch, `remax` with the greedy
# response. `optimal_token_baseline` gives no baseline to tokens of a single response (`zero_tail`).
PARAMETERS = {
    "gae": {"gamma": 1.0, "lam": 1.0, "whiten_advantages": True},
    "reinforce_plus_plus": {"gamma": 1.0},
    "gdpo": {"divide_by_std": True, "reward_components": ["score", "format"], "component_weights": [1.0, 0.3]},
    "optimal_token_baseline": {"zero_tail": False},
}


def sampled(rewards: Tensor, mask: Tensor, groups: Tensor, by_group: Tensor, seed: int) -> Sampled:
    """Everything that some estimator reads. The components of the reward are equal in each group as well."""
    probabilities = torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed))
    return Sampled(
        rewards,
        mask,
        groups,
        values=torch.full(mask.shape, 0.3),
        greedy_scores=by_group[groups].float(),
        log_probs=probabilities.log(),
        squared_probabilities=probabilities.square(),
        components={"score": by_group[groups].float(), "format": 0.1 * by_group[groups].float()},
    )


@pytest.mark.parametrize("name", ESTIMATORS)
@given(value=scores, size=sizes, prompts=st.integers(1, 3), seed=seeds)
def test_responses_of_equal_score_have_no_advantage(
    name: str, value: float, size: int, prompts: int, seed: int
) -> None:
    mask, groups = random_mask(seed, size * prompts, TOKENS), torch.arange(size * prompts) // size
    rewards = token_rewards(torch.full((len(mask),), value), torch.zeros(mask.shape).double(), mask, 0.0)
    case = sampled(rewards, mask, groups, torch.full((prompts,), value), seed)
    advantages = ESTIMATORS[name].estimate(case, **PARAMETERS.get(name, defaults(name))).advantages
    assert (advantages == 0).all()


@pytest.mark.parametrize("name", [row.name for row in ESTIMATORS.values() if row.compares_groups])
@given(values=st.lists(scores, min_size=2, max_size=4), size=sizes, seed=seeds, shuffled=st.booleans())
def test_each_group_has_its_own_score(name: str, values: list[float], size: int, seed: int, shuffled: bool) -> None:
    groups = torch.arange(size * len(values)) // size
    if shuffled:
        groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed))]
    mask, by_group = random_mask(seed, len(groups), TOKENS), torch.tensor(values)
    rewards = token_rewards(by_group[groups], torch.zeros(mask.shape).double(), mask, 0.0)
    case = sampled(rewards, mask, groups, by_group, seed)
    advantages = ESTIMATORS[name].estimate(case, **PARAMETERS.get(name, defaults(name))).advantages
    assert (advantages == 0).all()


@pytest.mark.parametrize(
    "name", [row.name for row in ESTIMATORS.values() if row.compares_groups and row.name != "gdpo"]
)
@given(value=turns, parts=st.lists(st.lists(turns, max_size=3), min_size=2, max_size=16))
def test_a_score_is_the_same_whichever_turns_earned_it(name: str, value: float, parts: list[list[float]]) -> None:
    mask, by_token = torch.ones(len(parts), TOKENS, dtype=torch.bool), [list(enumerate(row)) for row in parts]
    rewards = token_rewards(torch.full((len(parts),), value), torch.zeros(mask.shape).double(), mask, 0.0)
    move_to_tokens(rewards, by_token, mask)
    groups = torch.zeros(len(parts), dtype=torch.int64)
    case = sampled(rewards, mask, groups, torch.tensor([value]), 0)
    advantages = ESTIMATORS[name].estimate(case, **PARAMETERS.get(name, defaults(name))).advantages
    first = advantages[:, 0] if name == "optimal_token_baseline" else advantages  # later returns do differ
    assert (first == 0).all()


def defaults(name: str) -> dict[str, object]:
    return {key: parameter.default for key, parameter in ESTIMATORS[name].parameters.items()}


@given(value=scores, rows=sizes, seed=seeds)
def test_equal_values_have_no_deviation(value: float, rows: int, seed: int) -> None:
    mask = random_mask(seed, rows, TOKENS)
    values = torch.full(mask.shape, value).where(mask, 7.0)
    assert (whiten(values, mask) == 0).all()
    assert (covariances(torch.randn(mask.shape), values, mask) == 0).all()
    assert explained_variance(torch.randn(mask.shape), values, mask) == 0.0


@given(value=st.floats(-1e6, 1e6), count=st.integers(2, 40))
def test_responses_of_equal_score_do_not_spread_in_validation(value: float, count: int) -> None:
    metrics = prompt_metrics([value] * count, ["a"] * count)
    assert {number for name, number in metrics.items() if "std" in name} == {0.0}
    assert {number for name, number in metrics.items() if "std" not in name} == {value}


@pytest.mark.parametrize(("value", "size"), [(1.1, 64), (0.9, 32), (1.1, 16), (0.7, 8)])
def test_grpo_of_float32_rewards(value: float, size: int) -> None:
    rewards, mask, groups = torch.full((size, 1), value), torch.ones(size, 1).bool(), torch.zeros(size).long()
    for divide in (True, False):
        assert (gdpo([rewards[:, 0]], [1.0], mask, groups, divide) == 0).all()
        advantages = ESTIMATORS["grpo"].estimate(Sampled(rewards, mask, groups), divide_by_std=divide).advantages
        assert (advantages == 0).all()
