"""REINFORCE++."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.algorithms.advantages.gae import GAMMA
from trainer.algorithms.returns import rewards_to_go, whiten
from trainer.algorithms.rows import Advantages, Estimator, Sampled

if TYPE_CHECKING:
    from torch import Tensor


def reinforce_plus_plus(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """REINFORCE++ (Hu et al. 2025, arXiv:2501.03262): discounted future rewards, whitened over the whole batch.

        G_t = r_t + gamma G_{t+1}        A = (G - mean(G)) / std(G)

    Args:
        rewards: [rows, tokens] float, usually with the KL penalty subtracted.
        mask: [rows, tokens] bool.

    Returns:
        advantages: [rows, tokens], 0 where masked.
    """
    return whiten(rewards_to_go(rewards, mask, gamma), mask)


def _estimate(sampled: Sampled, gamma: float) -> Advantages:
    return Advantages(reinforce_plus_plus(sampled.rewards, sampled.mask, gamma))


ROW = Estimator(name="reinforce_plus_plus", estimate=_estimate, parameters={"gamma": GAMMA})
