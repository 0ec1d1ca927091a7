"""Group-relative advantages of each component of the reward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.algorithms.advantages.grpo import DIVIDE_BY_STD, grpo
from trainer.algorithms.returns import whiten
from trainer.algorithms.rows import Advantages, Estimator, Sampled
from trainer.errors import RewardError
from trainer.rows import Parameter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def gdpo(
    components: Sequence[Tensor], weights: Sequence[float], mask: Tensor, groups: Tensor, divide_by_std: bool
) -> Tensor:
    """Components of the reward, each normalised in its group, summed and whitened (arXiv:2601.05242, section 3).

        A = whitened(sum over k of w_k (r_ki - mean(r_k of the group)) / (std(r_k of the group) + 1e-6))

    A component of large values does not hide the others, as it does in the advantage of their sum.

    Args:
        components: [rows] each; weights: one number for each.
        mask, groups: see `grpo`.

    Returns:
        advantages: [rows, tokens], 0 where masked.
    """
    total = sum(
        weight * grpo(values.unsqueeze(1), mask, groups, divide_by_std)
        for weight, values in zip(weights, components, strict=True)
    )
    return whiten(total, mask)


def _estimate(
    sampled: Sampled, reward_components: Sequence[str], component_weights: Sequence[float], divide_by_std: bool
) -> Advantages:
    if missing := [name for name in reward_components if name not in sampled.components]:
        raise RewardError(
            f"algorithm.reward_components: not every reward has a number {', '.join(missing)}",
            hint=f"the rewards have {', '.join(sampled.components)}; a rule or function returns them beside score",
        )
    components = [sampled.components[name] for name in reward_components]
    weights = component_weights or [1.0] * len(components)
    return Advantages(gdpo(components, weights, sampled.mask, sampled.groups, divide_by_std))


ROW = Estimator(
    name="gdpo",
    estimate=_estimate,
    compares_groups=True,
    needs_components=True,
    parameters={
        "divide_by_std": DIVIDE_BY_STD,
        "reward_components": Parameter(
            type=list[str],
            default=[],
            description="gdpo: names of the numbers that the reward rule or function returns, like [format, accuracy]",
        ),
        "component_weights": Parameter(
            type=list[float], default=[], description="gdpo: a weight for each component; 1 each when not given"
        ),
    },
)
