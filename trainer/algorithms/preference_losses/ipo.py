"""Identity preference optimisation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.algorithms.rows import PreferenceLoss

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.algorithms.rows import Pairs


def ipo(pairs: Pairs, beta: float) -> Tensor:
    """IPO (Azar et al. 2023, arXiv:2310.12036, equation 17) on means over tokens, as in TRL.

    loss = (chosen / tokens - rejected / tokens - 1 / (2 beta))^2
    """
    means = pairs.chosen / pairs.chosen_lengths - pairs.rejected / pairs.rejected_lengths
    return (means - 1 / (2 * beta)).square()


ROW = PreferenceLoss(name="ipo", loss=ipo)
