"""Group sequence policy optimisation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.algorithms.losses.clipping import RANGE, bounds, clipped_surrogate
from trainer.algorithms.rows import PolicyLoss, TokenLoss

if TYPE_CHECKING:
    from torch import Tensor

MEAN_LOG_RATIO_LIMIT = 10.0
"""The mean log-ratio of a response beyond this is clamped, so that its exponential stays finite."""


def gspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_ratio: float,
    clip_ratio_low: float | None,
    clip_ratio_high: float | None,
) -> TokenLoss:
    """Group sequence policy optimisation: one ratio per response (Zheng et al. 2025, arXiv:2507.18071, section 4.3).

        s = exp(mean over the response of (log_probs - old_log_probs))
        s_t = sg[s] exp(log_probs_t - sg[log_probs_t])        loss = max(-A s_t, -A clip(s_t, 1 - low, 1 + high))

    s_t equals s and carries the gradient of its own token only. With `seq-mean-token-mean`, the sum over the tokens is
    the gradient of the sequence's loss, equation 5. Typical clip ranges are about 3e-4. There is no dual clip: with
    A < 0 the loss grows with the ratio, up to exp(10), where it loses its gradient.

    Args: see `ppo`. The mean covers the unmasked tokens.
    """
    difference = (log_probs - old_log_probs).where(mask, 0.0)
    mean = difference.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
    ratio = (mean.detach() + log_probs - log_probs.detach()).clamp(max=MEAN_LOG_RATIO_LIMIT).exp()
    return clipped_surrogate(ratio, advantages, *bounds(clip_ratio, clip_ratio_low, clip_ratio_high), dual=None)


ROW = PolicyLoss(name="gspo", loss=gspo, parameters=RANGE)
