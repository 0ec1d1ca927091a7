"""Truncated importance sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.algorithms.off_policy.importance import HIGH
from trainer.algorithms.rows import Correction

if TYPE_CHECKING:
    from torch import Tensor


def truncated_importance_sampling(ratio: Tensor, mask: Tensor, correction_high: float) -> Tensor:
    """min(ratio, correction_high) of each token.

    Source: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL".

    Args:
        ratio: [rows, tokens] float, from `raw_ratio`.
        mask: [rows, tokens] bool.

    Returns:
        [rows, tokens], 0 where masked.
    """
    return ratio.clamp(max=correction_high).where(mask, 0.0)


ROW = Correction(name="tis", weights=truncated_importance_sampling, parameters={"correction_high": HIGH})
