"""On-policy RL with an optimal baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.algorithms.groups import at_every_token, deviations, scores_of
from trainer.algorithms.rows import Advantages, Estimator, Sampled

if TYPE_CHECKING:
    from torch import Tensor


def opo(rewards: Tensor, mask: Tensor, groups: Tensor) -> Tensor:
    """Score minus the mean of the group weighted by length (Hao et al. 2025, arXiv:2505.23585, equation 7).

        A_i = R_i - sum(L R) / sum(L) over the group, the same at every token

    This baseline has the least variance if the gradients of tokens are orthogonal and of equal norm. The advantage of a
    response alone in its group is its score.

    Args, returns: see `grpo`.
    """
    return at_every_token(deviations(scores_of(rewards), groups, weights=mask.sum(dim=1)), rewards, mask)


def _estimate(sampled: Sampled) -> Advantages:
    return Advantages(opo(sampled.rewards, sampled.mask, sampled.groups))


ROW = Estimator(name="opo", estimate=_estimate, compares_groups=True)
