"""The clipped surrogate objective that several policy losses share, and its settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.algorithms.rows import TokenLoss
from trainer.rows import Parameter

if TYPE_CHECKING:
    from torch import Tensor

RANGE = {
    "clip_ratio": Parameter(
        type=float,
        default=0.2,
        description="epsilon of the clipped policy loss: ratios are clipped to 1 - epsilon and 1 + epsilon; "
        "dppo_tv, dppo_kl: largest divergence of a token",
        constraints={"gt": 0},
    ),
    "clip_ratio_low": Parameter(
        type=float | None, description="lower epsilon; null: clip_ratio", constraints={"gt": 0}
    ),
    "clip_ratio_high": Parameter(
        type=float | None, description="upper epsilon; null: clip_ratio", constraints={"gt": 0}
    ),
}
DUAL = Parameter(
    type=float | None,
    default=3.0,
    description="upper bound of the ratio. ppo: for tokens with a negative advantage (dual clip); dppo_tv, dppo_kl: "
    "for all tokens; null: none",
    constraints={"gt": 1},
)


def lower_and_upper(
    clip_ratio: float, clip_ratio_low: float | None, clip_ratio_high: float | None
) -> tuple[float, float]:
    """The lower and the upper epsilon."""
    low = clip_ratio if clip_ratio_low is None else clip_ratio_low
    high = clip_ratio if clip_ratio_high is None else clip_ratio_high
    return low, high


def bounds(clip_ratio: float, clip_ratio_low: float | None, clip_ratio_high: float | None) -> tuple[float, float]:
    """The smallest and the largest ratio inside the clip range."""
    low, high = lower_and_upper(clip_ratio, clip_ratio_low, clip_ratio_high)
    return 1 - low, 1 + high


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None) -> TokenLoss:
    """max(-A r, -A clip(r, low, high)), and at most -A dual where A < 0. Every tensor is [rows, tokens]."""
    unclipped = -advantages * ratio
    clamped = -advantages * ratio.clamp(low, high)
    loss, clipped = unclipped.maximum(clamped), clamped > unclipped
    if dual is None:
        return TokenLoss(loss, clipped)
    bound = -advantages * dual
    beyond = (advantages < 0) & (loss > bound)
    return TokenLoss(bound.where(beyond, loss), clipped | beyond)
