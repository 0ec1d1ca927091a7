"""Masked importance sampling of whole responses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.algorithms.off_policy.importance import HIGH, LOW
from trainer.algorithms.rows import Correction

if TYPE_CHECKING:
    from torch import Tensor


def sequence_mask(ratio: Tensor, mask: Tensor, correction_low: float, correction_high: float) -> Tensor:
    """1 for tokens of responses whose geometric mean ratio is inside [correction_low, correction_high], else 0.

    Source: Liu et al. 2025, "When Speed Kills Stability", masked importance sampling.

    Args:
        ratio: [rows, tokens] float, from `raw_ratio`.
        mask: [rows, tokens] bool.

    Returns:
        [rows, tokens], 0 where masked.
    """
    log_ratio = ratio.log().where(mask, 0.0)
    mean = (log_ratio.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)).exp()
    return ((mean >= correction_low) & (mean <= correction_high) & mask).to(ratio.dtype)


ROW = Correction(
    name="sequence_mask",
    weights=sequence_mask,
    parameters={"correction_low": LOW, "correction_high": HIGH},
    sequence_level=True,
    masks_only=True,
)
