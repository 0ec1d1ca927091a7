"""Responses to one prompt share a number in `groups`; estimators without a critic compare them.

The score of a response is the sum of its rewards, so a KL penalty in the rewards counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def sum_by_group(values: Tensor, groups: Tensor) -> Tensor:
    """values [rows] summed by group: [groups]."""
    return values.new_zeros(int(groups.max()) + 1).index_add(0, groups, values)


def at_every_token(values: Tensor, mask: Tensor) -> Tensor:
    """values [rows] spread over the unmasked tokens: [rows, tokens]."""
    return values.unsqueeze(1).expand(mask.shape).where(mask, 0.0)
