"""ReMax."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.algorithms.returns import rewards_to_go
from trainer.algorithms.rows import Advantages, Estimator, Sampled

if TYPE_CHECKING:
    from torch import Tensor


def remax(rewards: Tensor, mask: Tensor, greedy_scores: Tensor) -> Tensor:
    """ReMax (Li et al. 2023, arXiv:2310.10505, equation 5): future rewards minus the score of the greedy response.

        A_t = sum of r from t on - R(greedy response to the same prompt)

    Args:
        rewards: [rows, tokens] float.
        mask: [rows, tokens] bool.
        greedy_scores: [rows] float.

    Returns:
        advantages: [rows, tokens], 0 where masked.
    """
    return (rewards_to_go(rewards, mask, gamma=1.0) - greedy_scores.unsqueeze(1)).where(mask, 0.0)


def _estimate(sampled: Sampled) -> Advantages:
    assert sampled.greedy_scores is not None
    return Advantages(remax(sampled.rewards, sampled.mask, sampled.greedy_scores))


ROW = Estimator(name="remax", estimate=_estimate, needs_greedy_responses=True)
