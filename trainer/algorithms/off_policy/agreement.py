"""Agreement of engine and trainer on the log-probs of the same tokens under the same weights."""

import math

from torch import Tensor


def log_prob_agreement(rollout: Tensor, trainer: Tensor, mask: Tensor, smallest_mass: float = 1.0) -> dict[str, float]:
    """Metrics of trainer - rollout over the unmasked tokens. Only rounding contributes if both compute the same policy.

    An engine that samples from the likeliest tokens only divides by their probability, which is between
    `smallest_mass` and 1. The trainer's log-prob is lower by its logarithm. Differences in that range do not count.

        log_prob_difference         largest absolute difference
        log_prob_difference_mean    mean absolute difference
        ratio_outside_tenth         share of tokens with a probability ratio outside [0.9, 1.1]

    Args:
        rollout, trainer: [rows, tokens] log-probs.
        mask: [rows, tokens] bool.
    """
    difference = (trainer - rollout)[mask]
    difference = difference - difference.clamp(math.log(smallest_mass) if smallest_mass else -math.inf, 0.0)
    ratio = difference.exp()
    return {
        "rollout/log_prob_difference": difference.abs().max().item(),
        "rollout/log_prob_difference_mean": difference.abs().mean().item(),
        "rollout/ratio_outside_tenth": ((ratio < 0.9) | (ratio > 1.1)).float().mean().item(),
    }
