"""Weights against the gap between the engine that sampled and the trainer that learns, one function per method.

Engine and trainer compute the same policy with other kernels, in other precision or of other age; importance weights
make up for it. They multiply the loss of each token and carry no gradient.
"""

from torch import Tensor

from trainer.algorithms.policy_loss import LOG_RATIO_LIMIT


def raw_ratio(log_probs: Tensor, rollout_log_probs: Tensor) -> Tensor:
    """Trainer's over engine's probability of each token, exp(log_probs - rollout_log_probs); any one shape.

    Log this one: after truncation a drift no longer shows.
    """
    return (log_probs - rollout_log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def truncated_importance_sampling(ratio: Tensor, mask: Tensor, _low: float, high: float) -> Tensor:
    """min(ratio, high) per token (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL").

    Args:
        ratio: [rows, tokens] float, of `raw_ratio`.
        mask: [rows, tokens] bool.
        _low: has no part in it.

    Returns:
        [rows, tokens], 0 where masked.
    """
    return ratio.clamp(max=high).where(mask, 0.0)


def icepop(ratio: Tensor, mask: Tensor, low: float, high: float) -> Tensor:
    """The ratio inside [low, high], 0 outside: tokens that the two disagree about too much are left out
    (Ling Team 2025, arXiv:2510.18855, "Every Step Evolves", IcePop).

    Args, returns: as of `truncated_importance_sampling`.
    """
    return ratio.where((ratio >= low) & (ratio <= high) & mask, 0.0)


def sequence_mask(ratio: Tensor, mask: Tensor, low: float, high: float) -> Tensor:
    """1 for the tokens of a response whose geometric mean ratio lies in [low, high], else 0: whole responses only
    (Liu et al. 2025, "When Speed Kills Stability", masked importance sampling).

    Args, returns: as of `truncated_importance_sampling`.
    """
    log_ratio = ratio.log().where(mask, 0.0)
    mean = (log_ratio.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)).exp()
    return ((mean >= low) & (mean <= high) & mask).to(ratio.dtype)
