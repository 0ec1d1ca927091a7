"""Probability ratios between two policies.

Engine and trainer may differ in kernels, precision or age of the weights. Corrections weight the loss of each token by
a function of the ratio. The weights carry no gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.rows import Parameter

if TYPE_CHECKING:
    from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""exp(20) is far outside any clip range and well inside float32."""

LOW = Parameter(type=float, default=0.5, description="smallest accepted ratio trainer / engine", constraints={"ge": 0})
HIGH = Parameter(type=float, default=2.0, description="largest accepted ratio trainer / engine", constraints={"gt": 0})


def log_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """log_probs - old_log_probs, clamped so that its exponential stays finite; any one shape."""
    return (log_probs - old_log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def raw_ratio(log_probs: Tensor, rollout_log_probs: Tensor) -> Tensor:
    """Probability of each token under the trainer divided by that under the engine; any one shape.

    Log this ratio, because truncated ratios hide drift.
    """
    return log_ratio(log_probs, rollout_log_probs).exp()


def sequence_ratio(ratio: Tensor, mask: Tensor) -> Tensor:
    """The product of each row's unmasked ratios, [rows, 1], between exp(-20) and exp(20)."""
    return ratio.log().where(mask, 0.0).sum(dim=1, keepdim=True).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def geometric_mean(weights: Tensor, mask: Tensor) -> Tensor:
    """The geometric mean of each row's unmasked weights, [rows, 1]; 0 if nearly all of them are."""
    logs = (weights + 1e-10).log().where(mask, 0.0)
    return (logs.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)).exp()


def approximate_kl(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """KL(old policy || new policy) per token by k3, r - 1 - log r; any one shape.

    Shows how far a step moved the policy.
    """
    difference = log_ratio(log_probs, old_log_probs).detach()
    return difference.expm1() - difference
