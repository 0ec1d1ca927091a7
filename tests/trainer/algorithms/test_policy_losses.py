"""Policy losses without a clipped ratio per token: loss and gradient equal those written with plain numbers."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.testing import assert_close

from tests.trainer.tensors import normal, random_mask, seeds
from trainer.algorithms.off_policy.importance import geometric_mean
from trainer.algorithms.policy_losses.clip_cov import clip_cov
from trainer.algorithms.policy_losses.gmpo import gmpo
from trainer.algorithms.policy_losses.kl_cov import kl_cov
from trainer.algorithms.registry import POLICY_LOSSES

LOW, HIGH, DUAL = 0.1, 0.3, 3.0
ROWS, TOKENS = 4, 6


class Token(NamedTuple):
    new: float
    old: float
    advantage: float

    @property
    def ratio(self) -> float:
        return math.exp(self.new - self.old)


def slow_gpg(token: Token) -> tuple[float, float]:
    return -token.advantage * token.new, -token.advantage


def slow_dro(token: Token) -> tuple[float, float]:
    difference = token.new - token.old
    return -token.advantage * token.new + 0.35 * difference**2, -token.advantage + 0.7 * difference


def slow_sapo(token: Token) -> tuple[float, float]:
    tau = 1.0 if token.advantage > 0 else 1.05
    gate = 1 / (1 + math.exp(-tau * (token.ratio - 1)))
    return -token.advantage * gate * 4 / tau, -token.advantage * 4 * gate * (1 - gate) * token.ratio


def slow_dppo_tv(token: Token) -> tuple[float, float]:
    change = math.exp(token.new) - math.exp(token.old)
    beyond = change > HIGH if token.advantage > 0 else change < -LOW
    weight = 0.0 if beyond else min(token.ratio, DUAL)
    return -weight * token.advantage * token.new, -weight * token.advantage


def slow_dppo_kl(token: Token) -> tuple[float, float]:
    p, q = math.exp(token.old), math.exp(token.new)
    divergence = p * math.log(p / q) + (1 - p) * math.log((1 - p + 1e-8) / (1 - q + 1e-8))
    beyond = q > p and divergence > HIGH if token.advantage > 0 else q < p and divergence > LOW
    weight = 0.0 if beyond else min(token.ratio, DUAL)
    return -weight * token.advantage * token.new, -weight * token.advantage


def policies(seed: int, spread: float = 0.7) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probs of new and old policy, below 0, advantages and mask."""
    old = -0.05 - 2 * normal(seed, ROWS, TOKENS).abs()
    new = -(spread * normal(seed + 1, ROWS, TOKENS) - old).abs() - 0.01
    return new.requires_grad_(), old, 2 * normal(seed + 2, ROWS, TOKENS), random_mask(seed, ROWS, TOKENS)


@pytest.mark.parametrize(
    ("name", "slow", "parameters"),
    [
        ("gpg", slow_gpg, {}),
        ("dro", slow_dro, {"dro_beta": 0.7}),
        ("sapo", slow_sapo, {}),
        ("dppo_tv", slow_dppo_tv, {"clip_ratio_low": LOW, "clip_ratio_high": HIGH, "clip_dual": DUAL}),
        ("dppo_kl", slow_dppo_kl, {"clip_ratio_low": LOW, "clip_ratio_high": HIGH, "clip_dual": DUAL}),
    ],
)
@given(seed=seeds)
def test_each_token_has_its_own_loss_and_gradient(
    name: str, slow: Callable[[Token], tuple[float, float]], parameters: dict[str, float], seed: int
) -> None:
    new, old, advantages, mask = policies(seed)
    row = POLICY_LOSSES[name]
    defaults = {name: parameter.default for name, parameter in row.parameters.items()}
    loss = row.loss(new, old, advantages, mask, **(defaults | parameters)).loss
    (gradient,) = torch.autograd.grad(loss.sum(), new)
    values = [tensor.detach().flatten().tolist() for tensor in (new, old, advantages)]
    expected = torch.tensor([slow(Token(*token)) for token in zip(*values, strict=True)], dtype=torch.float64)
    assert_close(torch.stack([loss.detach().flatten(), gradient.flatten()], dim=1), expected)


def slow_geometric_mean(tokens: Sequence[Token]) -> float:
    """Loss of a response: a ratio counts only up to the clip range on the side that the advantage favours."""
    logs = []
    for token in tokens:
        difference = token.new - token.old
        logs.append(min(difference, HIGH) if token.advantage > 0 else max(difference, -LOW))
    advantage = sum(token.advantage for token in tokens) / len(tokens)
    return -advantage * math.exp(sum(logs) / len(logs))


@given(seed=seeds)
def test_gmpo_gives_every_token_the_loss_of_its_response(seed: int) -> None:
    new, old, _, mask = policies(seed)
    advantages = normal(seed + 2, ROWS, 1).expand(ROWS, TOKENS)
    loss = gmpo(new, old, advantages, mask, 0.2, LOW, HIGH).loss
    for row in range(ROWS):
        values = [tensor[row, mask[row]].tolist() for tensor in (new.detach(), old, advantages)]
        expected = slow_geometric_mean([Token(*token) for token in zip(*values, strict=True)])
        assert_close(loss[row].detach(), torch.full((TOKENS,), expected, dtype=torch.float64))


def test_a_loss_per_response_is_corrected_by_the_geometric_mean_of_the_weights() -> None:
    weights, mask = torch.tensor([[2.0, 0.5, 9.0], [4.0, 1.0, 1.0]]), torch.tensor([[True, True, False], [True] * 3])
    assert_close(geometric_mean(weights, mask), torch.tensor([[1.0], [4 ** (1 / 3)]]))


def slow_covariances(new: Tensor, advantages: Tensor, mask: Tensor) -> list[tuple[float, int]]:
    """Covariance and index of each unmasked token, the largest first."""
    chosen = mask.flatten().nonzero().flatten().tolist()
    a, b = ([tensor.flatten().tolist()[index] for index in chosen] for tensor in (new.detach(), advantages))
    mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
    return sorted(((x - mean_a) * (y - mean_b), index) for x, y, index in zip(a, b, chosen, strict=True))[::-1]


@given(seed=seeds)
def test_kl_cov_penalises_the_tokens_of_largest_covariance(seed: int) -> None:
    new, old, advantages, mask = policies(seed)
    result = kl_cov(new, old, advantages, mask, kl_cov_ratio=0.2, kl_cov_coefficient=0.5)
    count = max(1, int(0.2 * int(mask.sum())))
    penalised = {index for _, index in slow_covariances(new, advantages, mask)[:count]}
    difference = (new - old).detach()
    expected = -advantages * difference.exp()
    for index in penalised:
        expected.view(-1)[index] += 0.5 * abs(difference.flatten()[index].item())
    assert_close(result.loss.detach(), expected)
    assert set(result.clipped.flatten().nonzero().flatten().tolist()) == penalised


@given(seed=seeds)
def test_clip_cov_leaves_out_some_tokens_of_large_covariance(seed: int) -> None:
    new, old, advantages, mask = policies(seed)
    ppo = POLICY_LOSSES["ppo"].loss(
        new, old, advantages, mask, clip_ratio=0.2, clip_ratio_low=LOW, clip_ratio_high=HIGH, clip_dual=None
    )
    result = clip_cov(new, old, advantages, mask, 0.2, LOW, HIGH, 0.15, 0.2, 2.0)
    unclipped = {index for index in range(ROWS * TOKENS) if not ppo.clipped.flatten()[index]}
    inside = {index for value, index in slow_covariances(new, advantages, mask) if 0.2 < value < 2.0} & unclipped
    left_out = set((result.clipped & ~ppo.clipped).flatten().nonzero().flatten().tolist())
    assert left_out <= inside
    assert len(left_out) == min(len(inside), max(1, int(0.15 * int(mask.sum()))))
    kept = torch.tensor([index not in left_out for index in range(ROWS * TOKENS)]).view(ROWS, TOKENS)
    assert_close(result.loss, ppo.loss.where(kept, 0.0))
    again = clip_cov(new, old, advantages, mask, 0.2, LOW, HIGH, 0.15, 0.2, 2.0)
    assert torch.equal(result.clipped, again.clipped)  # a resumed run draws the same tokens
