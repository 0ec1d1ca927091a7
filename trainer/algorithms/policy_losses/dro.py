"""Direct reward optimisation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.algorithms.rows import PolicyLoss, TokenLoss
from trainer.rows import Parameter

if TYPE_CHECKING:
    from torch import Tensor


def dro(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, dro_beta: float) -> TokenLoss:
    """The policy gradient with a quadratic penalty on the log-ratio (Richemond et al. 2024, arXiv:2405.19107).

        loss = -A log_probs + (dro_beta / 2) (log_probs - old_log_probs)^2

    Args: see `ppo`.
    """
    penalty = dro_beta / 2 * (log_probs - old_log_probs).square()
    return TokenLoss(-advantages * log_probs + penalty, mask.new_zeros(mask.shape))


ROW = PolicyLoss(
    name="dro",
    loss=dro,
    parameters={
        "dro_beta": Parameter(
            type=float, default=1.0, description="dro: weight of the squared log-ratio", constraints={"gt": 0}
        )
    },
)
