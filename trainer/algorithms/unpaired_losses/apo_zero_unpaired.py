"""Anchored preference optimisation for single responses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.algorithms.rows import UnpairedLoss

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.algorithms.rows import Labelled


def apo_zero_unpaired(responses: Labelled, beta: float) -> Tensor:
    """APO-zero (D'Oosterlinck et al. 2024, arXiv:2408.06266, equation 7) without pairs: KTO's loss with a KL of 0."""
    ratios = responses.ratios
    return 1 - (beta * ratios.where(responses.desirable, -ratios)).sigmoid()


ROW = UnpairedLoss(name="apo_zero_unpaired", loss=apo_zero_unpaired)
