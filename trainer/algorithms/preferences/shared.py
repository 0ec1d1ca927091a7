"""What several preference losses share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.rows import Parameter

if TYPE_CHECKING:
    from torch import Tensor

LABEL_SMOOTHING = Parameter(
    type=float,
    default=0.0,
    description="sigmoid, robust: share of the labels that are taken to be wrong",
    constraints={"ge": 0, "lt": 0.5},
)


def log_sigmoid(x: Tensor) -> Tensor:
    """log(sigmoid(x)), exact for large values of either sign."""
    return -x.new_zeros(()).logaddexp(-x)
