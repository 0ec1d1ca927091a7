"""Responses compared with others to the same prompt, which have the same number in `groups`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def scores_of(rewards: Tensor) -> Tensor:
    """The score of each response, [rows] float64: the sum of its rewards [rows, tokens], any KL penalty included.

    In float64 the sum of float32 numbers is exact, so equal scores stay equal whichever tokens earned them.
    """
    return rewards.double().sum(dim=1)


def deviations(values: Tensor, groups: Tensor, weights: Tensor | None = None) -> Tensor:
    """Values minus the weighted mean of their group, exactly 0 where a group's values are equal.

    A sum of equal numbers may be rounded, a sum of zeros is not: each group's smallest value is subtracted first. A row
    alone in its group has no baseline, so its values are returned.

    Args:
        values: [rows, ...] float; groups: [rows] int64.
        weights: [rows, ...], at least 0; None: all values have the same weight.

    Returns:
        [rows, ...] float64.
    """
    values = values.double()
    weights = values.new_ones(values.shape) if weights is None else weights.double()
    smallest = _smallest_by_group(values.masked_fill(weights == 0, float("inf")), groups)
    shifted = values - smallest.where(smallest.isfinite(), 0.0)[groups]
    totals = sum_by_group(weights, groups)
    means = sum_by_group(weights * shifted, groups) / totals.where(totals > 0, 1.0)
    sizes = group_sizes(groups).view(-1, *[1] * (values.dim() - 1))
    return (shifted - means[groups]).where(sizes > 1, values)


def group_sizes(groups: Tensor) -> Tensor:
    """Rows in the row's group, [rows] int64."""
    return groups.bincount()[groups]


def in_large_groups(learning: Tensor, groups: Tensor, smallest: int) -> Tensor:
    """The learning rows of groups in which at least `smallest` rows learn, [rows] bool; `learning` is [rows] bool."""
    return learning & (sum_by_group(learning.long(), groups)[groups] >= smallest)


def sum_by_group(values: Tensor, groups: Tensor) -> Tensor:
    """Sum of values [rows, ...] per group: [groups, ...]."""
    return values.new_zeros(int(groups.max()) + 1, *values.shape[1:]).index_add(0, groups, values)


def at_every_token(values: Tensor, rewards: Tensor, mask: Tensor) -> Tensor:
    """values [rows] at every unmasked token, [rows, tokens] in the type of the rewards, 0 where masked."""
    return values.to(rewards.dtype).unsqueeze(1).expand(mask.shape).where(mask, 0.0)


def _smallest_by_group(values: Tensor, groups: Tensor) -> Tensor:
    """Smallest of values [rows, ...] per group: [groups, ...]."""
    index = groups.view(-1, *[1] * (values.dim() - 1)).expand(values.shape)
    largest = values.new_full((int(groups.max()) + 1, *values.shape[1:]), float("inf"))
    return largest.scatter_reduce(0, index, values, "amin")
