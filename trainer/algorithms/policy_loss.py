"""The clipped loss of PPO's policy."""

from typing import NamedTuple

import torch
from torch import Tensor

from trainer.algorithms.aggregation import token_mean

# exp(20) is far outside any clip range and still far inside float32.
LOG_RATIO_LIMIT = 20.0


class PolicyLoss(NamedTuple):
    """Each a scalar, and each a share of the global mini-batch's mean: add them up over ranks and micro-batches."""

    loss: Tensor
    clip_fraction: Tensor
    approximate_kl: Tensor


def clipped_policy_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, clip_ratio: float, token_count: int
) -> PolicyLoss:
    """The clipped surrogate of PPO (Schulman et al. 2017, arXiv:1707.06347, equation 7), with the sign of a loss.

        r = exp(log_probs - old_log_probs)        loss = mean(max(-A r, -A clip(r, 1 - clip_ratio, 1 + clip_ratio)))

    `clip_fraction` is the share of tokens whose gradient the clip removes; `approximate_kl` is k3 of the old to the
    new policy, r - 1 - log r.

    Args:
        log_probs, old_log_probs, advantages: [rows, tokens] float; only log_probs needs a gradient.
        mask: [rows, tokens] bool.
        token_count: unmasked tokens of the global mini-batch.
    """
    log_ratio = (log_probs - old_log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_ratio, 1 + clip_ratio)
    with torch.no_grad():
        clip_fraction = token_mean((clipped > unclipped).to(ratio.dtype), mask, token_count)
        approximate_kl = token_mean(ratio - 1 - log_ratio, mask, token_count)
    return PolicyLoss(token_mean(torch.maximum(unclipped, clipped), mask, token_count), clip_fraction, approximate_kl)
