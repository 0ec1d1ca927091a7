"""Anchored preference optimisation for responses worse than the policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.algorithms.rows import PreferenceLoss

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.algorithms.rows import Pairs


def apo_down(pairs: Pairs, beta: float) -> Tensor:
    """APO-down (D'Oosterlinck et al. 2024, arXiv:2408.06266, equation 8): both down, the rejected more."""
    return (beta * pairs.chosen).sigmoid() + 1 - (beta * pairs.margins).sigmoid()


ROW = PreferenceLoss(name="apo_down", loss=apo_down)
