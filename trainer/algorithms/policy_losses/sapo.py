"""Soft adaptive policy optimisation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.algorithms.off_policy.importance import log_ratio
from trainer.algorithms.rows import PolicyLoss, TokenLoss
from trainer.rows import Parameter

if TYPE_CHECKING:
    from torch import Tensor


def sapo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    tau_positive: float,
    tau_negative: float,
) -> TokenLoss:
    """A smooth gate instead of clipping (Gao et al. 2025, arXiv:2511.20347, equations 5 and 6).

        loss = -A (4 / tau) sigmoid(tau (r - 1)),    tau = tau_positive where A > 0, else tau_negative

    At r = 1 the gradient is that of PPO; it fades as r leaves 1, faster with a larger tau. No token is clipped.

    Args: see `ppo`.
    """
    ratio = log_ratio(log_probs, old_log_probs).exp()
    tau = ratio.new_full((), tau_positive).where(advantages > 0, tau_negative)
    gate = (tau * (ratio - 1)).sigmoid() * 4 / tau
    return TokenLoss(-advantages * gate, mask.new_zeros(mask.shape))


ROW = PolicyLoss(
    name="sapo",
    loss=sapo,
    parameters={
        "tau_positive": Parameter(
            type=float,
            default=1.0,
            description="sapo: how fast the gradient fades for tokens with a positive advantage",
            constraints={"gt": 0},
        ),
        "tau_negative": Parameter(
            type=float,
            default=1.05,
            description="sapo: how fast the gradient fades for other tokens",
            constraints={"gt": 0},
        ),
    },
    aggregation="seq-mean-token-mean",
)
