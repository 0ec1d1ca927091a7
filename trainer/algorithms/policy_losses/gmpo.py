"""Geometric-mean policy optimisation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.algorithms.losses.clipping import RANGE, lower_and_upper
from trainer.algorithms.off_policy.importance import log_ratio
from trainer.algorithms.rows import PolicyLoss, TokenLoss

if TYPE_CHECKING:
    from torch import Tensor


def gmpo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_ratio: float,
    clip_ratio_low: float | None,
    clip_ratio_high: float | None,
) -> TokenLoss:
    """The geometric mean of the clipped token ratios (Zhao et al. 2025, arXiv:2507.20673, equation 4).

        d_t = log_probs_t - old_log_probs_t, clipped on the side of A's sign to [-low, high]
        loss = -mean(A) exp(mean of d over the response), the same at every token

    The clip range applies to log-ratios; the paper uses 0.4.

    Args: see `ppo`. Means cover the unmasked tokens of a response.
    """
    low, high = lower_and_upper(clip_ratio, clip_ratio_low, clip_ratio_high)
    difference = log_ratio(log_probs, old_log_probs)
    held = difference.clamp(-low, high)
    sign = advantages.sign()
    lesser = sign * (sign * difference).minimum(sign * held)
    lengths = mask.sum(dim=1, keepdim=True).clamp(min=1)
    ratio = (lesser.where(mask, 0.0).sum(dim=1, keepdim=True) / lengths).exp()
    advantage = advantages.where(mask, 0.0).sum(dim=1, keepdim=True) / lengths
    return TokenLoss((-advantage * ratio).expand(mask.shape), lesser != difference)


ROW = PolicyLoss(
    name="gmpo",
    loss=gmpo,
    parameters=RANGE,
    aggregation="seq-mean-token-mean",
    sequence_level=True,
)
