"""Rejection of tokens and responses on which engine and trainer disagree too much: they do not train.

Each criterion is a statistic of d = log(trainer / engine), per token or over the unmasked tokens of a response.

    k1 = d                   bounded by a ratio on both sides
    k2 = d^2 / 2             bounded from above
    k3 = exp(d) - 1 - d      bounded from above

Source: Liu et al. 2025, "When Speed Kills Stability", richardli.xyz/rl-collapse.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from trainer.algorithms.off_policy.importance import log_ratio

if TYPE_CHECKING:
    from torch import Tensor

Criterion = Literal[
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
    "token_veto",
]
Bound = float | tuple[float, float]


def ratio_bounds(bound: Bound) -> tuple[float, float]:
    """The smallest and the largest ratio; a single bound also holds for the inverse ratio."""
    return bound if isinstance(bound, tuple) else (1 / bound, bound)


def accepted(log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, bounds: Mapping[Criterion, Bound]) -> Tensor:
    """The unmasked tokens that meet all criteria.

        token_*      each token by itself
        seq_sum_*    all tokens of a response by the sum of its tokens' statistics; seq_mean_*, seq_max_* alike
        token_veto   all tokens of a response by its smallest ratio, which must not be below the bound

    Args:
        log_probs, rollout_log_probs: [rows, tokens] of the trainer and of the engine.
        mask: [rows, tokens] bool.

    Returns:
        [rows, tokens] bool.
    """
    difference = log_ratio(log_probs, rollout_log_probs)
    kept = mask
    for criterion, bound in bounds.items():
        kept = kept & _meets(criterion, bound, difference, mask)
    return kept


def _meets(criterion: Criterion, bound: Bound, difference: Tensor, mask: Tensor) -> Tensor:
    if criterion == "token_veto":
        assert not isinstance(bound, tuple)
        return difference.where(mask, 0.0).amin(dim=1, keepdim=True) >= min(0.0, math.log(bound))
    scope, _, estimator = criterion.rpartition("_")
    values = {"k1": difference, "k2": difference.square() / 2, "k3": difference.expm1() - difference}[estimator]
    statistic = _over(scope, values, mask)
    if estimator == "k1":
        low, high = ratio_bounds(bound)
        return (statistic >= math.log(low)) & (statistic <= math.log(high))
    return statistic <= bound


def _over(scope: str, values: Tensor, mask: Tensor) -> Tensor:
    """The statistic of each token, [rows, tokens], or of each response, [rows, 1]."""
    values = values.where(mask, 0.0)  # also the least value of k2 and k3
    match scope:
        case "token":
            return values
        case "seq_sum":
            return values.sum(dim=1, keepdim=True)
        case "seq_mean":
            return values.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
        case _:
            return values.amax(dim=1, keepdim=True)
