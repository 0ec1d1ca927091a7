"""Self-play preference optimisation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.algorithms.rows import PreferenceLoss

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.algorithms.rows import Pairs


def sppo_hard(pairs: Pairs, beta: float) -> Tensor:
    """SPPO with hard labels (Wu et al. 2024, arXiv:2405.00675, equation 4.7 with probabilities 1 and 0)."""
    return (pairs.chosen - 0.5 / beta).square() + (pairs.rejected + 0.5 / beta).square()


ROW = PreferenceLoss(name="sppo_hard", loss=sppo_hard)
