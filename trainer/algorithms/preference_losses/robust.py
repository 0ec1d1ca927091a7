"""DPO with noisy labels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.algorithms.preferences.shared import LABEL_SMOOTHING, log_sigmoid
from trainer.algorithms.rows import PreferenceLoss

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.algorithms.rows import Pairs


def robust(pairs: Pairs, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """An unbiased estimate of DPO's loss under wrong labels (Chowdhury et al. 2024, arXiv:2403.00409, equation 12).

    loss = (-(1 - s) log sigmoid(m) + s log sigmoid(-m)) / (1 - 2 s),    m = beta (chosen - rejected)
    """
    margins = beta * pairs.margins
    weighted = -(1 - label_smoothing) * log_sigmoid(margins) + label_smoothing * log_sigmoid(-margins)
    return weighted / (1 - 2 * label_smoothing)


ROW = PreferenceLoss(name="robust", loss=robust, parameters={"label_smoothing": LABEL_SMOOTHING})
