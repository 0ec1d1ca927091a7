"""The KL divergence to a reference policy from sampled tokens: estimated, as a loss, and held at a target."""

import torch
from torch import Tensor

from trainer.algorithms.policy_loss import LOG_RATIO_LIMIT
from trainer.config.tree import KlEstimator


def kl_estimate(log_probs: Tensor, reference_log_probs: Tensor, estimator: KlEstimator) -> Tensor:
    """KL(policy || reference) per token, from one token sampled from the policy.

        d = log p - log q
        k1 = d                  unbiased, of high variance
        k2 = d^2 / 2            biased, of low variance
        k3 = exp(-d) - 1 + d    unbiased, never negative

    Schulman 2020, "Approximating KL divergence", joschu.net/blog/kl-approx.html.

    These are values to subtract from the reward; for a loss take `kl_loss`.

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


def kl_loss(log_probs: Tensor, reference_log_probs: Tensor, estimator: KlEstimator, unbiased: bool) -> Tensor:
    """A loss per token whose value is the estimate and whose gradient, if `unbiased`, is that of the KL.

    The sample does not follow the policy when the gradient is taken, so the gradient of k1 is zero on average and
    that of k3 is of the KL the other way round. That of k2, d grad(log p), is the KL's on average (Tang and Munos
    2025, arXiv:2506.09477): k2 - sg[k2] + sg[estimate].

    Args: as of `kl_estimate`.
    """
    value = kl_estimate(log_probs, reference_log_probs, estimator)
    if not unbiased:
        return value
    carrier = kl_estimate(log_probs, reference_log_probs, "k2")
    return carrier - carrier.detach() + value.detach()


def adapted_kl_coefficient(coefficient: float, kl: float, target: float, horizon: int, samples: int) -> float:
    """The coefficient of the next step, from the KL of this one (Ziegler et al. 2019, arXiv:1909.08593, section 2.2).

        coefficient (1 + clip(kl / target - 1, -0.2, 0.2) samples / horizon)

    Args:
        kl: mean over the step's tokens.
        horizon, samples: both in responses; larger horizons adapt more slowly.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coefficient * (1 + error * samples / horizon)
