"""Divergence PPO: bounds the KL between a token's old and new probability instead of its ratio."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.algorithms.losses.clipping import DUAL, RANGE, lower_and_upper
from trainer.algorithms.losses.divergence import binary_kl, inside_trust_region
from trainer.algorithms.rows import PolicyLoss, TokenLoss

if TYPE_CHECKING:
    from torch import Tensor


def dppo_kl(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    _mask: Tensor,
    clip_ratio: float,
    clip_ratio_low: float | None,
    clip_ratio_high: float | None,
    clip_dual: float | None,
) -> TokenLoss:
    """Policy gradient inside a bound on the KL (arXiv:2602.04879, DPPO-Binary-KL).

        loss = -sg[min(r, clip_dual)] A log_probs
        0 where A > 0, p > p_old and KL > high, and where A <= 0, p < p_old and KL > low

    p is the probability of the token, and KL that of sampling this token or any other.

    Args: see `ppo`.
    """
    low, high = lower_and_upper(clip_ratio, clip_ratio_low, clip_ratio_high)
    new = log_probs.detach()
    divergence = binary_kl(old_log_probs, new)
    risen, fallen = new > old_log_probs, new < old_log_probs
    inside = ((divergence <= high) | ~risen).where(advantages > 0, (divergence <= low) | ~fallen)
    return inside_trust_region(log_probs, old_log_probs, advantages, inside, clip_dual)


ROW = PolicyLoss(name="dppo_kl", loss=dppo_kl, parameters={**RANGE, "clip_dual": DUAL})
