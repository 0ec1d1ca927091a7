"""The distance between the engine's and the trainer's log-probs of the same tokens under the same weights."""

from torch import Tensor


def log_prob_agreement(rollout: Tensor, trainer: Tensor, mask: Tensor) -> dict[str, float]:
    """Metrics of the difference. It is rounding error as long as both compute the same policy.

    `log_prob_difference` is the largest, `log_prob_difference_mean` the mean of |difference|, and
    `ratio_outside_tenth` the share of tokens whose ratio of probabilities is outside [0.9, 1.1].

    Args:
        rollout, trainer: [rows, tokens] log-probs; mask: [rows, tokens] bool.
    """
    difference = (trainer - rollout)[mask]
    ratio = difference.exp()
    return {
        "rollout/log_prob_difference": difference.abs().max().item(),
        "rollout/log_prob_difference_mean": difference.abs().mean().item(),
        "rollout/ratio_outside_tenth": ((ratio < 0.9) | (ratio > 1.1)).float().mean().item(),
    }
