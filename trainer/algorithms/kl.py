"""Estimates of the KL divergence to a reference policy from sampled tokens."""

from typing import Literal

import torch
from torch import Tensor

from trainer.algorithms.policy_loss import LOG_RATIO_LIMIT


def kl_estimate(log_probs: Tensor, reference_log_probs: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """KL(policy || reference) per token, from one token sampled from the policy.

        d = log p - log q
        k1 = d                  unbiased, of high variance
        k2 = d^2 / 2            biased, of low variance
        k3 = exp(-d) - 1 + d    unbiased, never negative

    Schulman 2020, "Approximating KL divergence", joschu.net/blog/kl-approx.html.

    These are values to subtract from the reward. As a loss, k1 and k3 have gradients of something else than the KL.

    Args:
        log_probs, reference_log_probs: float, any one shape; log-probs of the same tokens.
    """
    difference = (log_probs - reference_log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    match estimator:
        case "k1":
            return difference
        case "k2":
            return difference.square() / 2
        case "k3":
            return torch.expm1(-difference) + difference
