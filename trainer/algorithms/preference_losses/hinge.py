"""A hinge on the margin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.algorithms.rows import PreferenceLoss

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.algorithms.rows import Pairs


def hinge(pairs: Pairs, beta: float) -> Tensor:
    """max(0, 1 - beta (chosen - rejected)) (SLiC: Zhao et al. 2023, arXiv:2305.10425, on DPO's margin)."""
    return (1 - beta * pairs.margins).clamp(min=0)


ROW = PreferenceLoss(name="hinge", loss=hinge)
