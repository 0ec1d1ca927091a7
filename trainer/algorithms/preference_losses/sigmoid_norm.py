"""DPO on means over tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.algorithms.preferences.shared import log_sigmoid
from trainer.algorithms.rows import PreferenceLoss

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.algorithms.rows import Pairs


def sigmoid_norm(pairs: Pairs, beta: float) -> Tensor:
    """-log sigmoid(beta (chosen / tokens - rejected / tokens)), so long responses weigh no more than short ones."""
    means = pairs.chosen / pairs.chosen_lengths - pairs.rejected / pairs.rejected_lengths
    return -log_sigmoid(beta * means)


ROW = PreferenceLoss(name="sigmoid_norm", loss=sigmoid_norm)
