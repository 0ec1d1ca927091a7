"""REINFORCE++ with the mean of the group as baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.algorithms.groups import at_every_token, deviations, scores_of
from trainer.algorithms.returns import whiten
from trainer.algorithms.rows import Advantages, Estimator, Sampled

if TYPE_CHECKING:
    from torch import Tensor


def reinforce_plus_plus_baseline(rewards: Tensor, mask: Tensor, groups: Tensor) -> Tensor:
    """Group-relative scores, whitened over the tokens of the whole batch (Hu et al. 2025, arXiv:2501.03262, section 3).

        A = whitened(R_i - mean(R of the group))

    Args, returns: see `grpo`.
    """
    return whiten(at_every_token(deviations(scores_of(rewards), groups), rewards, mask), mask)


def _estimate(sampled: Sampled) -> Advantages:
    return Advantages(reinforce_plus_plus_baseline(sampled.rewards, sampled.mask, sampled.groups))


ROW = Estimator(
    name="reinforce_plus_plus_baseline",
    estimate=_estimate,
    compares_groups=True,
)
