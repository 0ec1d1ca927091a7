"""Sums over groups: responses to the same prompt have the same number in `groups`.

The score of a response is the sum of its rewards, which includes any KL penalty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def sum_by_group(values: Tensor, groups: Tensor) -> Tensor:
    """Sum of values [rows, ...] per group: [groups, ...]."""
    return values.new_zeros(int(groups.max()) + 1, *values.shape[1:]).index_add(0, groups, values)


def group_means(values: Tensor, groups: Tensor) -> Tensor:
    """The mean of the row's group, for each of values [rows]: [rows].

    A row alone in its group gets 0: it has no baseline, so its advantage is its score.
    """
    sizes = group_sizes(groups, values)
    return (sum_by_group(values, groups)[groups] / sizes).where(sizes > 1, 0.0)


def group_sizes(groups: Tensor, like: Tensor) -> Tensor:
    """Rows in the row's group, [rows] in the type of `like`."""
    return sum_by_group(like.new_ones(groups.shape), groups)[groups]


def at_every_token(values: Tensor, mask: Tensor) -> Tensor:
    """values [rows] repeated at every unmasked token: [rows, tokens], 0 where masked."""
    return values.unsqueeze(1).expand(mask.shape).where(mask, 0.0)
