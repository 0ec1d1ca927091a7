"""Truncated importance sampling of whole responses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.algorithms.off_policy.importance import HIGH, sequence_ratio
from trainer.algorithms.rows import Correction

if TYPE_CHECKING:
    from torch import Tensor


def sequence_tis(ratio: Tensor, mask: Tensor, correction_high: float) -> Tensor:
    """min(product of the response's ratios, correction_high).

    Unbiased below the bound, of higher variance than `tis`. Source: Liu et al. 2025, "When Speed Kills Stability".

    Args:
        ratio: [rows, tokens] float, from `raw_ratio`.
        mask: [rows, tokens] bool.

    Returns:
        [rows, tokens], equal at every token of a response, 0 where masked.
    """
    return sequence_ratio(ratio, mask).clamp(max=correction_high).expand(mask.shape).where(mask, 0.0)


ROW = Correction(
    name="sequence_tis",
    weights=sequence_tis,
    parameters={"correction_high": HIGH},
    sequence_level=True,
)
