"""The loss of DPO."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.algorithms.preferences.shared import LABEL_SMOOTHING, log_sigmoid
from trainer.algorithms.rows import PreferenceLoss

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.algorithms.rows import Pairs


def sigmoid(pairs: Pairs, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """DPO (Rafailov et al. 2023, arXiv:2305.18290, equation 7) with wrong labels (Mitchell 2023, "A note on DPO").

    loss = -(1 - s) log sigmoid(m) - s log sigmoid(-m),    m = beta (chosen - rejected)
    """
    margins = beta * pairs.margins
    return -(1 - label_smoothing) * log_sigmoid(margins) - label_smoothing * log_sigmoid(-margins)


ROW = PreferenceLoss(name="sigmoid", loss=sigmoid, parameters={"label_smoothing": LABEL_SMOOTHING})
