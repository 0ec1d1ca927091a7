"""Noise contrastive alignment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.algorithms.preferences.shared import log_sigmoid
from trainer.algorithms.rows import PreferenceLoss

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.algorithms.rows import Pairs


def nca_pair(pairs: Pairs, beta: float) -> Tensor:
    """NCA for pairs (Chen et al. 2024, arXiv:2402.05369): absolute likelihoods count, not only their difference."""
    chosen, rejected = beta * pairs.chosen, beta * pairs.rejected
    return -log_sigmoid(chosen) - 0.5 * log_sigmoid(-chosen) - 0.5 * log_sigmoid(-rejected)


ROW = PreferenceLoss(name="nca_pair", loss=nca_pair)
