"""Advantages that need no critic: a response is compared with others instead of with a value.

Responses to one prompt share a number in `groups`. What a response earned is the sum of its rewards, so a KL taken off
the rewards counts in.
"""

import torch
from torch import Tensor

from trainer.algorithms.advantages import rewards_to_go, whiten


def grpo(rewards: Tensor, mask: Tensor, groups: Tensor, divide_by_std: bool) -> Tensor:
    """Group-relative advantages (Shao et al. 2024, arXiv:2402.03300, section 4.1.2).

        A_i = (R_i - mean(R of the group)) / (std(R of the group) + 1e-6), the same at every token

    Without the division every prompt weighs the same, whether it is nearly solved or half solved (Dr. GRPO, Liu et al.
    2025, arXiv:2503.20783). The std is the sample's, of n - 1. A response alone in its group gets 0.

    Args:
        rewards: [rows, tokens] float.
        mask: [rows, tokens] bool.
        groups: [rows] int64.

    Returns:
        advantages: [rows, tokens], 0 where masked.
    """
    scores = rewards.where(mask, 0.0).sum(dim=1)
    sizes = _sum_by_group(torch.ones_like(scores), groups)
    difference = scores - (_sum_by_group(scores, groups) / sizes)[groups]
    if divide_by_std:
        variance = _sum_by_group(difference.square(), groups) / (sizes - 1).clamp(min=1)
        difference = difference / (variance.sqrt()[groups] + 1e-6)
    return _at_every_token(difference, mask)


def rloo(rewards: Tensor, mask: Tensor, groups: Tensor) -> Tensor:
    """REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv:2402.14740, section 2.3).

        A_i = R_i - mean(R of the others in the group), the same at every token

    The baseline does not depend on the response, so the gradient is unbiased. A response alone in its group gets 0.

    Args, returns: as of `grpo`.
    """
    scores = rewards.where(mask, 0.0).sum(dim=1)
    sizes = _sum_by_group(torch.ones_like(scores), groups)[groups]
    others = (_sum_by_group(scores, groups)[groups] - scores) / (sizes - 1).clamp(min=1)
    return _at_every_token((scores - others).where(sizes > 1, 0.0), mask)


def reinforce_plus_plus(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """REINFORCE++ (Hu et al. 2025, arXiv:2501.03262): the discounted rewards to come, whitened over the whole batch.

        G_t = r_t + gamma G_{t+1}        A = (G - mean(G)) / std(G)

    Args:
        rewards: [rows, tokens] float, usually with the KL taken off.
        mask: [rows, tokens] bool.

    Returns:
        advantages: [rows, tokens], 0 where masked.
    """
    return whiten(rewards_to_go(rewards, mask, gamma), mask)


def remax(rewards: Tensor, mask: Tensor, greedy_scores: Tensor) -> Tensor:
    """ReMax (Li et al. 2023, arXiv:2310.10505, equation 5): rewards to come less the score of the greedy response.

        A_t = sum of r from t on - R(greedy response to the same prompt)

    Args:
        rewards: [rows, tokens] float.
        mask: [rows, tokens] bool.
        greedy_scores: [rows] float.

    Returns:
        advantages: [rows, tokens], 0 where masked.
    """
    return (rewards_to_go(rewards, mask, gamma=1.0) - greedy_scores.unsqueeze(1)).where(mask, 0.0)


def _sum_by_group(values: Tensor, groups: Tensor) -> Tensor:
    """values [rows] summed by group: [groups]."""
    return values.new_zeros(int(groups.max()) + 1).index_add(0, groups, values)


def _at_every_token(values: Tensor, mask: Tensor) -> Tensor:
    """values [rows] spread over the unmasked tokens: [rows, tokens]."""
    return values.unsqueeze(1).expand(mask.shape).where(mask, 0.0)
