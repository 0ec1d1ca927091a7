"""Divergence PPO: bounds the change of a token's probability instead of its ratio."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.algorithms.losses.clipping import DUAL, RANGE, lower_and_upper
from trainer.algorithms.losses.divergence import inside_trust_region
from trainer.algorithms.rows import PolicyLoss, TokenLoss

if TYPE_CHECKING:
    from torch import Tensor


def dppo_tv(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    _mask: Tensor,
    clip_ratio: float,
    clip_ratio_low: float | None,
    clip_ratio_high: float | None,
    clip_dual: float | None,
) -> TokenLoss:
    """Policy gradient inside a bound on the total variation (arXiv:2602.04879, DPPO-Binary-TV).

        loss = -sg[min(r, clip_dual)] A log_probs
        0 where A > 0 and p - p_old > high, and where A <= 0 and p - p_old < -low

    p is the probability of the token. A rare token may change by a large ratio, a likely token only by little.

    Args: see `ppo`.
    """
    low, high = lower_and_upper(clip_ratio, clip_ratio_low, clip_ratio_high)
    change = log_probs.detach().exp() - old_log_probs.exp()
    inside = (change <= high).where(advantages > 0, change >= -low)
    return inside_trust_region(log_probs, old_log_probs, advantages, inside, clip_dual)


ROW = PolicyLoss(name="dppo_tv", loss=dppo_tv, parameters={**RANGE, "clip_dual": DUAL})
