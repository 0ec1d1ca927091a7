"""Advantages with a critic, KL and entropy: equal to slow references, and independent of padding and masked values."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from tests.trainer.tensors import normal, random_mask, seeds
from trainer.algorithms.log_probs import log_probs_and_entropy
from trainer.algorithms.losses.aggregation import GlobalCount, aggregate
from trainer.algorithms.losses.kl import kl_estimate
from trainer.algorithms.returns import explained_variance, generalized_advantages, whiten

unit = st.floats(0, 1)


def slow_advantages(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Sum of discounted TD errors, term by term, for one row without masked tokens."""
    following = [*values[1:], 0.0]
    deltas = [r + gamma * after - v for r, v, after in zip(rewards, values, following, strict=True)]
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))]


@given(seeds, unit, unit)
def test_advantages_equal_the_sum_of_td_errors_over_the_unmasked_tokens(seed: int, gamma: float, lam: float) -> None:
    rewards, values, mask = normal(seed, 3, 7), normal(seed + 1, 3, 7), random_mask(seed, 3, 7)
    advantages, returns = generalized_advantages(rewards, values, mask, gamma, lam)
    for row in range(3):
        chosen = mask[row]
        expected = slow_advantages(rewards[row, chosen].tolist(), values[row, chosen].tolist(), gamma, lam)
        assert_close(advantages[row, chosen], torch.tensor(expected, dtype=torch.float64))
        assert_close(returns[row, chosen], advantages[row, chosen] + values[row, chosen])
        assert (advantages[row, ~chosen] == 0).all()
        assert (returns[row, ~chosen] == 0).all()


@given(seeds)
def test_values_at_masked_tokens_change_nothing(seed: int) -> None:
    """The property that padding and tool output rely on, for every function that takes a mask."""
    mask = random_mask(seed, 3, 7)
    a, b = normal(seed, 3, 7), normal(seed + 1, 3, 7)
    dirty_a, dirty_b = (tensor.where(mask, 1e6) for tensor in (a, b))
    count = GlobalCount(int(mask.sum()), len(mask))
    for clean, dirty in zip(
        (
            *generalized_advantages(a, b, mask, 0.9, 0.8),
            whiten(a, mask),
            aggregate(a, mask, "token-mean", count),
        ),
        (
            *generalized_advantages(dirty_a, dirty_b, mask, 0.9, 0.8),
            whiten(dirty_a, mask),
            aggregate(dirty_a, mask, "token-mean", count),
        ),
        strict=True,
    ):
        assert_close(clean, dirty, rtol=0, atol=0)


@given(seeds)
def test_padding_changes_no_unmasked_value(seed: int) -> None:
    mask = random_mask(seed, 3, 5)
    rewards, values = normal(seed, 3, 5), normal(seed + 1, 3, 5)

    def padded(tensor: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(tensor, (0, 4))

    short = generalized_advantages(rewards, values, mask, 0.95, 0.9)
    long = generalized_advantages(padded(rewards), padded(values), padded(mask), 0.95, 0.9)
    for a, b in zip(short, long, strict=True):
        assert_close(padded(a), b, rtol=0, atol=0)


def test_undiscounted_returns_are_the_sums_of_future_rewards() -> None:
    rewards, values = torch.tensor([[0.0, 0.5, 1.0]]), torch.tensor([[3.0, -2.0, 7.0]])
    advantages, returns = generalized_advantages(rewards, values, torch.ones(1, 3, dtype=torch.bool), 1.0, 1.0)
    assert_close(returns, torch.tensor([[1.5, 1.5, 1.0]]))
    assert_close(advantages, returns - values)


@given(seeds)
def test_whitened_values_have_mean_0_and_variance_1(seed: int) -> None:
    mask = random_mask(seed, 4, 6)
    whitened = whiten(5 + 3 * normal(seed, 4, 6), mask)[mask]
    assert_close(whitened.mean(), torch.zeros((), dtype=torch.float64), atol=1e-7, rtol=0)
    assert_close(whitened.var(), torch.ones((), dtype=torch.float64), atol=1e-6, rtol=0)


def test_a_single_value_whitens_to_zero() -> None:
    mask = torch.tensor([[True, False], [False, False]])
    assert (whiten(torch.full((2, 2), 4.0), mask) == 0).all()
    assert (whiten(torch.full((2, 2), 4.0), mask & False) == 0).all()


def test_kl_estimates_average_to_the_true_divergence() -> None:
    """k1 and k3 are unbiased: weighted by the policy they give the exact KL of two small distributions."""
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)
    true = (p * (p / q).log()).sum()
    assert_close((p * kl_estimate(p.log(), q.log(), "k1")).sum(), true)
    assert_close((p * kl_estimate(p.log(), q.log(), "k3")).sum(), true)
    assert_close((p * kl_estimate(p.log(), q.log(), "k2")).sum(), true, rtol=0.2, atol=0)
    assert (kl_estimate(p.log(), q.log(), "k3") >= 0).all()


@given(seeds, st.floats(0.2, 3))
def test_log_probs_and_entropy_belong_to_the_tempered_distribution(seed: int, temperature: float) -> None:
    logits, tokens = normal(seed, 5, 11).float(), torch.arange(5)
    log_probs, entropy = log_probs_and_entropy(logits, tokens, temperature)
    distribution = torch.distributions.Categorical(logits=logits / temperature)
    assert_close(log_probs, distribution.log_prob(tokens), atol=1e-5, rtol=1e-4)
    assert_close(entropy, distribution.entropy(), atol=1e-5, rtol=1e-4)


def test_explained_variance_of_perfect_and_constant_critics_and_of_equal_returns() -> None:
    returns, mask = torch.tensor([[1.0, 2.0, 3.0, 100.0]]), torch.tensor([[True, True, True, False]])
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance(torch.zeros(1, 4), returns, mask) == 0.0
    assert explained_variance(returns, torch.ones(1, 4), mask) == 0.0
