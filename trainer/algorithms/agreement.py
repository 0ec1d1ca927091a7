"""Agreement of engine and trainer on the log-probs of the same tokens under the same weights."""

from torch import Tensor


def log_prob_agreement(rollout: Tensor, trainer: Tensor, mask: Tensor) -> dict[str, float]:
    """Metrics of trainer - rollout over the unmasked tokens. Only rounding contributes if both compute the same policy.

        log_prob_difference         largest absolute difference
        log_prob_difference_mean    mean absolute difference
        ratio_outside_tenth         share of tokens with a probability ratio outside [0.9, 1.1]

    Args:
        rollout, trainer: [rows, tokens] log-probs.
        mask: [rows, tokens] bool.
    """
    difference = (trainer - rollout)[mask]
    ratio = difference.exp()
    return {
        "rollout/log_prob_difference": difference.abs().max().item(),
        "rollout/log_prob_difference_mean": difference.abs().mean().item(),
        "rollout/ratio_outside_tenth": ((ratio < 0.9) | (ratio > 1.1)).float().mean().item(),
    }
