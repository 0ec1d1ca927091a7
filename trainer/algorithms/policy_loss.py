"""Losses of the policy, one value per token; `trainer.algorithms.aggregation` makes one number of them."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# exp(20) is far outside any clip range and still far inside float32.
LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True)
class Clip:
    """How far the ratio new / old policy counts: from 1 - low to 1 + high, and up to `dual` where A < 0."""

    low: float
    high: float
    dual: float | None = None


class TokenLoss(NamedTuple):
    """Both [rows, tokens]: the loss of each token, and whether the clip took its gradient (or bounded its weight)."""

    loss: Tensor
    clipped: Tensor


def ppo(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, _mask: Tensor, clip: Clip) -> TokenLoss:
    """The clipped surrogate of PPO (Schulman et al. 2017, arXiv:1707.06347, equation 7), with the sign of a loss.

        r = exp(log_probs - old_log_probs)        loss = max(-A r, -A clip(r, 1 - low, 1 + high))

    `high` above `low` is clip-higher (Yu et al. 2025, arXiv:2503.14476, 3.1). With `dual` = c > 1, the loss of a token
    with A < 0 is at most -A c (Ye et al. 2020, arXiv:1912.09729, equation 5): without it, a bad token that the policy
    has meanwhile made much likelier would have a loss without bound.

    Args:
        log_probs, old_log_probs, advantages: [rows, tokens] float; only log_probs needs a gradient.
        _mask: [rows, tokens] bool; has no part in it, the aggregation leaves masked tokens out.
    """
    ratio = _log_ratio(log_probs, old_log_probs).exp()
    return _clipped_surrogate(ratio, advantages, clip)


def gspo(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, clip: Clip) -> TokenLoss:
    """Group sequence policy optimisation: one ratio per response (Zheng et al. 2025, arXiv:2507.18071, section 4.3).

        s = exp(mean over the response of (log_probs - old_log_probs))
        s_t = sg[s] exp(log_probs_t - sg[log_probs_t])        loss = max(-A s_t, -A clip(s_t, 1 - low, 1 + high))

    s_t equals s and carries the gradient of its own token only; with `seq-mean-token-mean` the sum over the tokens is
    the gradient of the sequence's loss, equation 5. Suits clip ranges of about 3e-4.

    Args: as of `ppo`; the mask decides over which tokens of a response the mean is.
    """
    difference = (log_probs - old_log_probs).where(mask, 0.0)
    mean = difference.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
    sequence_ratio = mean.detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    ratio = sequence_ratio * (log_probs - log_probs.detach()).exp()
    return _clipped_surrogate(ratio, advantages, clip)


def cispo(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, _mask: Tensor, clip: Clip) -> TokenLoss:
    """Clips the weight instead of the update: every token keeps a gradient (MiniMax 2025, arXiv:2506.13585, eq. 4).

        loss = -sg[clip(r, 1 - low, 1 + high)] A log_probs

    `dual` does not apply.

    Args: as of `ppo`.
    """
    ratio = _log_ratio(log_probs, old_log_probs).detach().exp()
    weight = ratio.clamp(1 - clip.low, 1 + clip.high)
    return TokenLoss(-weight * advantages * log_probs, weight != ratio)


def approximate_kl(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """k3 of the old to the new policy per token, r - 1 - log r: a metric of how far a step went. Shapes as in `ppo`."""
    log_ratio = _log_ratio(log_probs, old_log_probs).detach()
    return torch.expm1(log_ratio) - log_ratio


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, clip: Clip) -> TokenLoss:
    unclipped = -advantages * ratio
    held = -advantages * ratio.clamp(1 - clip.low, 1 + clip.high)
    loss, clipped = torch.maximum(unclipped, held), held > unclipped
    if clip.dual is None:
        return TokenLoss(loss, clipped)
    bound = -advantages * clip.dual
    beyond = (advantages < 0) & (loss > bound)
    return TokenLoss(torch.where(beyond, bound, loss), clipped | beyond)


def _log_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    return (log_probs - old_log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
