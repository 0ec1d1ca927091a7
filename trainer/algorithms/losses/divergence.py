"""Trust regions that bound a divergence instead of a ratio (`dppo_kl`, `dppo_tv`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.algorithms.off_policy.importance import log_ratio
from trainer.algorithms.rows import TokenLoss

if TYPE_CHECKING:
    from torch import Tensor

EPSILON = 1e-8


def binary_kl(old_log_probs: Tensor, log_probs: Tensor) -> Tensor:
    """KL(old || new) of the choice between this token and any other, any one shape."""
    old, new = old_log_probs.exp(), log_probs.exp()
    others = (1 - old) * ((1 - old + EPSILON) / (1 - new + EPSILON)).log()
    return old * (old_log_probs - log_probs) + others


def inside_trust_region(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, inside: Tensor, largest: float | None
) -> TokenLoss:
    """-min(r, largest) A log_probs inside the region, 0 outside. Only `log_probs` has a gradient, not the ratio.

    Every tensor is [rows, tokens], `inside` is bool.
    """
    ratio = log_ratio(log_probs, old_log_probs).detach().exp()
    weight = ratio if largest is None else ratio.clamp(max=largest)
    return TokenLoss((-weight * advantages * log_probs).where(inside, 0.0), ~inside | (weight != ratio))
