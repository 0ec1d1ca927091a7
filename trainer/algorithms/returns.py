"""Returns, generalised advantages, deviations, whitening and explained variance over unmasked tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def generalized_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438, equation 16).

        delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lam A_{t+1}        R_t = A_t + V_t

    `t + 1` is the next *unmasked* token: the recursion skips padding, tool output and every other token that the policy
    did not choose, without discounting. The value after the last unmasked token is 0, because the response ends there.
    Returns are the critic's targets, so they are computed before whitening.

    Args:
        rewards, values: [rows, tokens] float.
        mask: [rows, tokens] bool, True where the policy chose the token.

    Returns:
        advantages, returns: [rows, tokens], 0 where masked.
    """
    # With tokens first, the values of one token are contiguous.
    by_token = [tensor.T.contiguous() for tensor in (rewards, values, mask)]
    advantages = by_token[1].new_empty(by_token[1].shape)
    next_value = values.new_zeros(values.shape[0])
    next_advantage = values.new_zeros(values.shape[0])
    for t in reversed(range(values.shape[1])):
        reward, value, chosen = (tensor[t] for tensor in by_token)
        delta = reward + gamma * next_value - value
        advantages[t] = delta + gamma * lam * next_advantage
        next_value = value.where(chosen, next_value)
        next_advantage = advantages[t].where(chosen, next_advantage)
    advantages = advantages.T.contiguous()
    return advantages.where(mask, 0.0), (advantages + values).where(mask, 0.0)


def rewards_to_go(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Discounted rewards from each token on: G_t = r_t + gamma G_{t+1}; `t + 1` is the next unmasked token.

    Args:
        rewards: [rows, tokens] float.
        mask: [rows, tokens] bool.

    Returns:
        [rows, tokens], 0 where masked.
    """
    return generalized_advantages(rewards, rewards.new_zeros(rewards.shape), mask, gamma, lam=1.0)[0]


def deviations(values: Tensor, mask: Tensor) -> Tensor:
    """The unmasked values minus their mean, exactly 0 if all are equal; 0 where masked.

    A sum of equal numbers may be rounded, a sum of zeros is not: the smallest value is subtracted first.

    Args:
        values: [rows, tokens] float.
        mask: [rows, tokens] bool.

    Returns:
        [rows, tokens] float64.
    """
    smallest = values.masked_fill(~mask, float("inf")).amin()
    shifted = (values.double() - smallest).where(mask, 0.0)
    return (shifted - shifted.sum() / mask.sum().clamp(min=1)).where(mask, 0.0)


def whiten(values: Tensor, mask: Tensor, epsilon: float = 1e-8) -> Tensor:
    """The unmasked values, shifted and scaled to mean 0 and sample variance 1; masked ones become 0.

    Pass the whole batch: moments of a part would scale each part differently (Huang et al. 2024, arXiv:2403.17031,
    detail 8).

    Args:
        values: [rows, tokens] float.
        mask: [rows, tokens] bool.
    """
    centred = deviations(values, mask)
    variance = centred.square().sum() / (mask.sum() - 1).clamp(min=1)
    return (centred * (variance + epsilon).rsqrt()).to(values.dtype)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(R - V) / Var(R) over the unmasked tokens: 1 for a perfect critic, 0 for one that predicts the mean.

    0 if all returns are equal or masked, because there is nothing to explain.

    Args:
        values, returns: [rows, tokens] float.
        mask: [rows, tokens] bool.
    """
    spread = deviations(returns, mask).square().sum()
    return 1.0 - float(deviations(returns - values, mask).square().sum() / spread) if spread > 0 else 0.0
