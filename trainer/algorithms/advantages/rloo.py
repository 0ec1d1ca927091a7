"""REINFORCE leave-one-out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.algorithms.groups import at_every_token, group_sizes, sum_by_group
from trainer.algorithms.rows import Advantages, Estimator, Sampled

if TYPE_CHECKING:
    from torch import Tensor


def rloo(rewards: Tensor, mask: Tensor, groups: Tensor) -> Tensor:
    """REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv:2402.14740, section 2.3).

        A_i = R_i - mean(R of the others in the group), the same at every token

    The baseline does not depend on the response, so the gradient is unbiased. The advantage of a response alone
    in its group is its score.

    Args, returns: see `grpo`.
    """
    scores = rewards.sum(dim=1)
    sizes = group_sizes(groups, scores)
    others = (sum_by_group(scores, groups)[groups] - scores) / (sizes - 1).clamp(min=1)
    return at_every_token(scores - others, mask)


def _estimate(sampled: Sampled) -> Advantages:
    return Advantages(rloo(sampled.rewards, sampled.mask, sampled.groups))


ROW = Estimator(name="rloo", estimate=_estimate, compares_groups=True, verl=("rloo", "rloo_vectorized"))
