"""Ratios of probabilities between two policies.

Engine and trainer compute the same policy with different kernels, precision or age. Corrections weight each token's
loss by a ratio; the weights carry no gradient.
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
    """The trainer's probability of each token over the engine's; any one shape.

    Log this one: truncated ratios hide drift.
    """
    return log_ratio(log_probs, rollout_log_probs).exp()


def approximate_kl(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """k3 of the old to the new policy per token, r - 1 - log r: how far a step moved the policy; any one shape."""
    difference = log_ratio(log_probs, old_log_probs).detach()
    return difference.expm1() - difference
