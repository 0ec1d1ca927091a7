"""The reward of each token: scores at the end of a response, parts of them where they were earned, and the KL."""

from collections.abc import Sequence

import torch
from torch import Tensor


def token_rewards(scores: Tensor, kl: Tensor, mask: Tensor, kl_coefficient: float) -> Tensor:
    """The score at each row's last token, minus the weighted KL at every token: [rows, tokens].

    Args:
        scores: [rows].
        kl: [rows, tokens], in the type that the rewards get.
        mask: [rows, tokens] bool with at least one True in each row.
    """
    rewards = (-kl_coefficient * kl).where(mask, 0.0)
    last = (mask * torch.arange(1, mask.shape[1] + 1)).argmax(dim=1)
    rewards[torch.arange(len(scores)), last] += scores
    return rewards


def move_to_tokens(rewards: Tensor, by_token: Sequence[Sequence[tuple[int, float]]], mask: Tensor) -> None:
    """Moves parts of each row's score from its last token to the tokens that earned them, in place.

    Parts are rounded to float32, as scores are. So float64 rewards keep each row's score to the bit.

    Args:
        rewards: [rows, tokens], with the whole score at the last token.
        by_token: for each row (position among the tokens that the policy sampled, reward); empty if no row has any.
        mask: [rows, tokens] bool, the tokens that the policy sampled.
    """
    for row, pairs in enumerate(by_token):
        if pairs:
            places = mask[row].nonzero().squeeze(1)
            for position, reward in pairs:
                part = torch.tensor(reward, dtype=torch.float32)
                rewards[row, places[position]] += part
                rewards[row, places[-1]] -= part


def on_trained_tokens(rewards: Tensor, trained: Tensor) -> Tensor:
    """The rewards, [rows, tokens], with those of tokens that do not train at the nearest earlier token that does.

    A score at a rejected last token would otherwise be lost to estimators that sum rewards from each token on. Rewards
    without such an earlier token stay where they are: no token that trains led to them.

    Args:
        rewards: [rows, tokens]; trained: [rows, tokens] bool.
    """
    columns = torch.arange(trained.shape[1]).expand(trained.shape)
    place = columns.where(trained, -1).cummax(dim=1).values
    return torch.zeros_like(rewards).scatter_add(1, place.where(place >= 0, columns), rewards)
