"""Group policy gradient, and plain REINFORCE: no ratio and no clipping."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.algorithms.rows import PolicyLoss, TokenLoss

if TYPE_CHECKING:
    from torch import Tensor


def gpg(log_probs: Tensor, _old_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> TokenLoss:
    """The policy gradient itself (Chu et al. 2025, arXiv:2504.02546, equation 5).

        loss = -A log_probs

    Args: see `ppo`.
    """
    return TokenLoss(-advantages * log_probs, mask.new_zeros(mask.shape))


ROW = PolicyLoss(name="gpg", loss=gpg, uses_ratio=False)
