"""The optimal baseline of each token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.algorithms.groups import deviations
from trainer.algorithms.returns import rewards_to_go
from trainer.algorithms.rows import Advantages, Estimator, Sampled
from trainer.rows import Parameter

if TYPE_CHECKING:
    from torch import Tensor


def optimal_token_baseline(
    rewards: Tensor,
    mask: Tensor,
    groups: Tensor,
    log_probs: Tensor,
    squared_probabilities: Tensor,
    weights: Tensor | None,
    zero_tail: bool,
) -> Tensor:
    """Future rewards minus the baseline with the least variance at each token (arXiv:2602.07078).

        G_t = sum of the rewards from t on      W_t = sum over j <= t of w_j^2 (1 - 2 p_j + sum over v of p_j(v)^2)
        A_it = G_it - sum(G_kt W_kt) / sum(W_kt)        over the responses k of the group that have a token t

    The bracket is the squared length of the gradient of token j's log-prob with respect to the logits. Where no
    response of the group has any, all have the same weight. A response alone in its group has no baseline.

    Args:
        rewards, mask, groups: see `grpo`.
        log_probs: [rows, tokens], of the sampled tokens.
        squared_probabilities: [rows, tokens], sum over the vocabulary of the squared probabilities.
        weights: [rows, tokens], the importance weights w of an off-policy correction; None: 1.
        zero_tail: no baseline where only the longest response of a group is left; it would equal its own return.

    Returns:
        advantages: [rows, tokens], 0 where masked.
    """
    returns = rewards_to_go(rewards, mask, gamma=1.0)
    lengths = (1 - 2 * log_probs.exp() + squared_probabilities).clamp(min=0.0)  # rounding may leave less than 0
    if weights is not None:
        lengths = lengths * weights.square()
    energy = lengths.double().where(mask, 0.0).cumsum(1)
    advantages = deviations(returns, groups, weights=(energy + 1e-8).where(mask, 0.0)).to(rewards.dtype)
    if zero_tail:
        advantages = returns.where(_tail(mask, groups), advantages)
    return advantages.where(mask, 0.0)


def _tail(mask: Tensor, groups: Tensor) -> Tensor:
    """Where the longest response of a group is longer than all others, its tokens beyond them: [rows, tokens] bool.

    A response is as long as the place of its last unmasked token: others may be between its tokens.
    """
    tail = mask.new_zeros(mask.shape)
    lengths = (mask.flip(1).cumsum(1) > 0).sum(dim=1)
    for group in groups.unique():
        rows = (groups == group).nonzero().squeeze(1)
        if len(rows) > 1:
            longest = lengths[rows].topk(2)
            tail[rows[longest.indices[0]], int(longest.values[1]) :] = True
    return tail


def _estimate(sampled: Sampled, zero_tail: bool) -> Advantages:
    assert sampled.log_probs is not None
    assert sampled.squared_probabilities is not None
    return Advantages(
        optimal_token_baseline(
            sampled.rewards,
            sampled.mask,
            sampled.groups,
            sampled.log_probs,
            sampled.squared_probabilities,
            sampled.weights,
            zero_tail,
        )
    )


ROW = Estimator(
    name="optimal_token_baseline",
    estimate=_estimate,
    compares_groups=True,
    needs_squared_probabilities=True,
    parameters={
        "zero_tail": Parameter(
            type=bool,
            default=True,
            description="optimal_token_baseline: no baseline where only the longest response of a group is left",
        )
    },
)
