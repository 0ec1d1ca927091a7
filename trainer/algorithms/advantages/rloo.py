"""REINFORCE leave-one-out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.algorithms.groups import at_every_token, deviations, group_sizes, scores_of
from trainer.algorithms.rows import Advantages, Estimator, Sampled

if TYPE_CHECKING:
    from torch import Tensor


def rloo(rewards: Tensor, mask: Tensor, groups: Tensor) -> Tensor:
    """REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv:2402.14740, section 2.3).

        A_i = R_i - mean(R of the others in the group) = (R_i - mean(R of the group)) n / (n - 1)

    It is the same at every token. The baseline does not depend on the response, so the gradient is unbiased. The
    advantage of a response alone in its group is its score.

    Args, returns: see `grpo`.
    """
    sizes = group_sizes(groups).double()
    scale = (sizes / (sizes - 1)).where(sizes > 1, 1.0)
    return at_every_token(scale * deviations(scores_of(rewards), groups), rewards, mask)


def _estimate(sampled: Sampled) -> Advantages:
    return Advantages(rloo(sampled.rewards, sampled.mask, sampled.groups))


ROW = Estimator(name="rloo", estimate=_estimate, compares_groups=True)
