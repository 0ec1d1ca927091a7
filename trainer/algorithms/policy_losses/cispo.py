"""CISPO: clips the importance weights instead of the update."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.algorithms.losses.clipping import RANGE, bounds
from trainer.algorithms.off_policy.importance import log_ratio
from trainer.algorithms.rows import PolicyLoss, TokenLoss

if TYPE_CHECKING:
    from torch import Tensor


def cispo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    _mask: Tensor,
    clip_ratio: float,
    clip_ratio_low: float | None,
    clip_ratio_high: float | None,
) -> TokenLoss:
    """REINFORCE with clipped importance weights: every token keeps a gradient (MiniMax 2025, arXiv:2506.13585, eq. 4).

        loss = -sg[clip(r, 1 - low, 1 + high)] A log_probs

    Args: see `ppo`.
    """
    ratio = log_ratio(log_probs, old_log_probs).detach().exp()
    weight = ratio.clamp(*bounds(clip_ratio, clip_ratio_low, clip_ratio_high))
    return TokenLoss(-weight * advantages * log_probs, weight != ratio)


ROW = PolicyLoss(name="cispo", loss=cispo, parameters=RANGE)
