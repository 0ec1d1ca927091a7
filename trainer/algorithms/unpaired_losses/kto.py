"""The loss of KTO."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.algorithms.rows import UnpairedLoss

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.algorithms.rows import Labelled


def kto(responses: Labelled, beta: float) -> Tensor:
    """Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv:2402.01306).

    loss = 1 - sigmoid(beta (r - KL)) of a desirable response, 1 - sigmoid(beta (KL - r)) of an undesirable one
    """
    gains = responses.ratios - responses.kl
    return 1 - (beta * gains.where(responses.desirable, -gains)).sigmoid()


ROW = UnpairedLoss(name="kto", loss=kto, needs_kl=True)
