"""IcePop for whole responses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.algorithms.off_policy.importance import HIGH, LOW, sequence_ratio
from trainer.algorithms.rows import Correction

if TYPE_CHECKING:
    from torch import Tensor


def sequence_icepop(ratio: Tensor, mask: Tensor, correction_low: float, correction_high: float) -> Tensor:
    """The product of the response's ratios inside [correction_low, correction_high], 0 outside.

    Args:
        ratio: [rows, tokens] float, from `raw_ratio`.
        mask: [rows, tokens] bool.

    Returns:
        [rows, tokens], equal at every token of a response, 0 where masked.
    """
    product = sequence_ratio(ratio, mask)
    inside = (product >= correction_low) & (product <= correction_high)
    return product.where(inside, 0.0).expand(mask.shape).where(mask, 0.0)


ROW = Correction(
    name="sequence_icepop",
    weights=sequence_icepop,
    parameters={"correction_low": LOW, "correction_high": HIGH},
    sequence_level=True,
)
