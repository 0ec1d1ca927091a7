"""KL divergence to a reference policy from sampled tokens: estimators, loss, and adaptive coefficient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from trainer.algorithms.off_policy.importance import LOG_RATIO_LIMIT

if TYPE_CHECKING:
    from torch import Tensor

KlEstimator = Literal["k1", "k2", "k3", "abs"]

K3_LIMIT = 10.0
"""k3 grows exponentially where the policy has lost a token that the reference likes: one such token would decide the
reward of its response."""


def kl_estimate(log_probs: Tensor, reference_log_probs: Tensor, estimator: KlEstimator) -> Tensor:
    """KL(policy || reference) per token, from one token sampled from the policy.

        d = log p - log q
        k1 = d                  unbiased, of high variance
        k2 = d^2 / 2            biased, of low variance
        k3 = exp(-d) - 1 + d    never negative, unbiased below its cap of 10; above it there is no gradient
        abs = |d|               biased

    Schulman 2020, "Approximating KL divergence", joschu.net/blog/kl-approx.html.

    Subtract these values from the reward; for a loss use `kl_loss`.

    Args:
        log_probs, reference_log_probs: float, any one shape; log-probs of the same tokens.
    """
    difference = log_probs - reference_log_probs
    match estimator:
        case "k1":
            return difference
        case "k2":
            return difference.square() / 2
        case "k3":
            difference = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
            return ((-difference).expm1() + difference).clamp(max=K3_LIMIT)
        case "abs":
            return difference.abs()


def kl_loss(log_probs: Tensor, reference_log_probs: Tensor, estimator: KlEstimator, unbiased: bool) -> Tensor:
    """Loss per token: its value is the estimate and, if `unbiased`, its expected gradient is that of the KL.

    The gradient treats the sample as fixed. In expectation, the gradient of k1 is therefore zero, that of k3 belongs to
    the reverse KL, and that of k2, d grad(log p), belongs to the KL (Tang and Munos 2025, arXiv:2506.09477). Hence the
    loss k2 - sg[k2] + sg[estimate].

    Args: see `kl_estimate`.
    """
    value = kl_estimate(log_probs, reference_log_probs, estimator)
    if not unbiased:
        return value
    carrier = kl_estimate(log_probs, reference_log_probs, "k2")
    return carrier - carrier.detach() + value.detach()


def mean_over_responses(kl: Tensor, mask: Tensor) -> float:
    """The mean over responses of each one's mean over its unmasked tokens.

    Args:
        kl: [rows, tokens] float; mask: [rows, tokens] bool.
    """
    return float((kl.where(mask, 0.0).sum(dim=1) / mask.sum(dim=1).clamp(min=1)).mean())


def adapted_kl_coefficient(coefficient: float, kl: float, target: float, horizon: int, samples: int) -> float:
    """The coefficient of the next step, given the KL of this one (Ziegler et al. 2019, arXiv:1909.08593, section 2.2).

        coefficient (1 + clip(kl / target - 1, -0.2, 0.2) samples / horizon)

    Args:
        kl: mean over the step's responses, see `mean_over_responses`.
        horizon, samples: in responses; a larger horizon adapts more slowly.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coefficient * (1 + error * samples / horizon)
