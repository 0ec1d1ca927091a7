"""Anchored preference optimisation for responses better than the policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.algorithms.rows import PreferenceLoss

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.algorithms.rows import Pairs


def apo_zero(pairs: Pairs, beta: float) -> Tensor:
    """APO-zero (D'Oosterlinck et al. 2024, arXiv:2408.06266, equation 7): the chosen up, the rejected down."""
    return 1 - (beta * pairs.chosen).sigmoid() + (beta * pairs.rejected).sigmoid()


ROW = PreferenceLoss(name="apo_zero", loss=apo_zero)
