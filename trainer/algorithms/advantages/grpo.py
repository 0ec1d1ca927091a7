"""Group-relative advantages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.algorithms.groups import at_every_token, deviations, group_sizes, scores_of, sum_by_group
from trainer.algorithms.rows import Advantages, Estimator, Sampled
from trainer.rows import Parameter

if TYPE_CHECKING:
    from torch import Tensor

DIVIDE_BY_STD = Parameter(
    type=bool,
    default=True,
    description="grpo, grpo_passk, gdpo: divide advantages by the standard deviation of the group; false: Dr. GRPO",
)


def grpo(rewards: Tensor, mask: Tensor, groups: Tensor, divide_by_std: bool) -> Tensor:
    """Group-relative advantages (Shao et al. 2024, arXiv:2402.03300, section 4.1.2).

        A_i = (R_i - mean(R of the group)) / (std(R of the group) + 1e-6), the same at every token

    The division gives more weight to prompts that are almost always or almost never solved; Dr. GRPO omits it (Liu et
    al. 2025, arXiv:2503.20783). The standard deviation is the sample's, with n - 1. A response alone in its group has
    mean 0 and standard deviation 1: its advantage is its score.

    Args:
        rewards: [rows, tokens] float, 0 where the policy did not choose the token.
        mask: [rows, tokens] bool, the tokens that train. Every reward counts, that of masked tokens as well.
        groups: [rows] int64.

    Returns:
        advantages: [rows, tokens], 0 where masked.
    """
    difference = deviations(scores_of(rewards), groups)
    if divide_by_std:
        sizes = group_sizes(groups)
        variance = sum_by_group(difference.square(), groups)[groups] / (sizes - 1).clamp(min=1)
        difference = difference / (variance.sqrt().where(sizes > 1, 1.0) + 1e-6)
    return at_every_token(difference, rewards, mask)


def _estimate(sampled: Sampled, divide_by_std: bool) -> Advantages:
    return Advantages(grpo(sampled.rewards, sampled.mask, sampled.groups, divide_by_std))


ROW = Estimator(
    name="grpo",
    estimate=_estimate,
    compares_groups=True,
    parameters={"divide_by_std": DIVIDE_BY_STD},
)
