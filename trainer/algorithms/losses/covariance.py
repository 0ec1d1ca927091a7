"""How strongly a token's update changes the entropy of the policy (Cui et al. 2025, arXiv:2505.22617, equation 7)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.algorithms.returns import deviations

if TYPE_CHECKING:
    from torch import Tensor


def covariances(log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """(log_probs - mean) (advantages - mean) of each token, [rows, tokens] float64; means cover the unmasked tokens.

    A large value marks a likely token with a high advantage, whose update lowers the entropy.
    """
    return deviations(log_probs, mask) * deviations(advantages, mask)
