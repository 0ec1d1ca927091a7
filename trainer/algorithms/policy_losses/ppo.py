"""The clipped surrogate of PPO."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.algorithms.losses.clipping import DUAL, RANGE, bounds, clipped_surrogate
from trainer.algorithms.off_policy.importance import log_ratio
from trainer.algorithms.rows import PolicyLoss, TokenLoss

if TYPE_CHECKING:
    from torch import Tensor


def ppo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    _mask: Tensor,
    clip_ratio: float,
    clip_ratio_low: float | None,
    clip_ratio_high: float | None,
    clip_dual: float | None,
) -> TokenLoss:
    """The clipped surrogate of PPO (Schulman et al. 2017, arXiv:1707.06347, equation 7), as a loss.

        r = exp(log_probs - old_log_probs)        loss = max(-A r, -A clip(r, 1 - low, 1 + high))

    `clip_ratio_high` above `clip_ratio_low` is clip-higher (Yu et al. 2025, arXiv:2503.14476, 3.1). With
    `clip_dual` = c, the loss of a token with A < 0 is at most -A c (Ye et al. 2020, arXiv:1912.09729, equation 5).
    Without it, that loss is unbounded if the token has become much more likely.

    Args:
        log_probs, old_log_probs, advantages: [rows, tokens] float; gradients flow through `log_probs` only.
        _mask: [rows, tokens] bool; unused, because aggregation drops masked tokens.
    """
    ratio = log_ratio(log_probs, old_log_probs).exp()
    return clipped_surrogate(ratio, advantages, *bounds(clip_ratio, clip_ratio_low, clip_ratio_high), clip_dual)


ROW = PolicyLoss(name="ppo", loss=ppo, parameters={**RANGE, "clip_dual": DUAL})
