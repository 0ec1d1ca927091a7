"""Group policy gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.algorithms.groups import at_every_token, deviations, scores_of
from trainer.algorithms.rows import Advantages, Estimator, Sampled

if TYPE_CHECKING:
    from torch import Tensor


def gpg(rewards: Tensor, mask: Tensor, groups: Tensor) -> Tensor:
    """Score minus the mean of the group, scaled up for responses without reward (Chu et al. 2025, arXiv:2504.02546).

        A_i = (R_i - mean(R of the group)) (responses / responses with R != 0), the same at every token

    Args, returns: see `grpo`.
    """
    scores = scores_of(rewards)
    scale = len(scores) / scores.count_nonzero().clamp(min=1)
    return at_every_token(scale * deviations(scores, groups), rewards, mask)


def _estimate(sampled: Sampled) -> Advantages:
    return Advantages(gpg(sampled.rewards, sampled.mask, sampled.groups))


ROW = Estimator(name="gpg", estimate=_estimate, compares_groups=True)
