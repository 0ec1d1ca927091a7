"""IcePop: masks tokens on which engine and trainer disagree too much."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.algorithms.off_policy.importance import HIGH, LOW
from trainer.algorithms.rows import Correction

if TYPE_CHECKING:
    from torch import Tensor


def icepop(ratio: Tensor, mask: Tensor, correction_low: float, correction_high: float) -> Tensor:
    """The ratio of each token inside [correction_low, correction_high], 0 outside.

    Source: Ling Team 2025, arXiv:2510.18855, "Every Step Evolves", IcePop.

    Args:
        ratio: [rows, tokens] float, from `raw_ratio`.
        mask: [rows, tokens] bool.

    Returns:
        [rows, tokens], 0 where masked.
    """
    return ratio.where((ratio >= correction_low) & (ratio <= correction_high) & mask, 0.0)


ROW = Correction(name="icepop", weights=icepop, parameters={"correction_low": LOW, "correction_high": HIGH})
