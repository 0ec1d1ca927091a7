"""Pass@k training: only the best response of a group learns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.algorithms.advantages.grpo import DIVIDE_BY_STD
from trainer.algorithms.groups import at_every_token, scores_of
from trainer.algorithms.rows import Advantages, Estimator, Sampled

if TYPE_CHECKING:
    from torch import Tensor


def grpo_passk(rewards: Tensor, mask: Tensor, groups: Tensor, divide_by_std: bool) -> Tensor:
    """Lead of the best response of each group, 0 for the others (Tang et al. 2025, arXiv:2503.19595).

        A_best = (R_best - R_second best) / (std(R of the group) + 1e-6), the same at every token

    Args, returns: see `grpo`. Of several best responses the lead is 0.
    """
    scores = scores_of(rewards)
    advantages = scores.new_zeros(scores.shape)
    for group in groups.unique():
        rows = (groups == group).nonzero().squeeze(1)
        if len(rows) > 1:
            best = scores[rows].topk(2)
            spread = scores[rows].std() + 1e-6 if divide_by_std else 1.0
            advantages[rows[best.indices[0]]] = (best.values[0] - best.values[1]) / spread
    return at_every_token(advantages, rewards, mask)


def _estimate(sampled: Sampled, divide_by_std: bool) -> Advantages:
    return Advantages(grpo_passk(sampled.rewards, sampled.mask, sampled.groups, divide_by_std))


ROW = Estimator(
    name="grpo_passk",
    estimate=_estimate,
    compares_groups=True,
    smallest_group=2,
    parameters={"divide_by_std": DIVIDE_BY_STD},
)
