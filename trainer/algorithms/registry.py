"""Every algorithm by the name that `trainer.config.tree` knows it by: a new one is a function and a line here."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from trainer.algorithms.advantages import generalized_advantages, whiten
from trainer.algorithms.corrections import icepop, sequence_mask, truncated_importance_sampling
from trainer.algorithms.critic_free import grpo, reinforce_plus_plus, remax, rloo
from trainer.algorithms.policy_loss import Clip, TokenLoss, cispo, gspo, ppo
from trainer.config.tree import AlgorithmConfig


@dataclass(frozen=True)
class Sampled:
    """What an estimator may look at. `rewards` and `mask` are [rows, tokens], `groups` is [rows] int64 and equal for
    the responses to one prompt; `values` [rows, tokens] and `greedy_scores` [rows] are there if the estimator needs
    them."""

    rewards: Tensor
    mask: Tensor
    groups: Tensor
    values: Tensor | None = None
    greedy_scores: Tensor | None = None


class Advantages(NamedTuple):
    """Both [rows, tokens]; `returns` are the critic's targets, None where there is no critic."""

    advantages: Tensor
    returns: Tensor | None


def _gae(sampled: Sampled, settings: AlgorithmConfig) -> Advantages:
    advantages, returns = generalized_advantages(
        sampled.rewards, sampled.values, sampled.mask, settings.gamma, settings.lam
    )
    return Advantages(whiten(advantages, sampled.mask) if settings.whiten_advantages else advantages, returns)


Estimator = Callable[[Sampled, AlgorithmConfig], Advantages]

ADVANTAGES: dict[str, Estimator] = {
    "gae": _gae,
    "grpo": lambda s, c: Advantages(grpo(s.rewards, s.mask, s.groups, c.divide_by_std), None),
    "rloo": lambda s, _: Advantages(rloo(s.rewards, s.mask, s.groups), None),
    "reinforce_plus_plus": lambda s, c: Advantages(reinforce_plus_plus(s.rewards, s.mask, c.gamma), None),
    "remax": lambda s, _: Advantages(remax(s.rewards, s.mask, s.greedy_scores), None),
}

# (log_probs, old_log_probs, advantages, mask, clip), each tensor [rows, tokens]
PolicyLoss = Callable[[Tensor, Tensor, Tensor, Tensor, Clip], TokenLoss]

POLICY_LOSSES: dict[str, PolicyLoss] = {"ppo": ppo, "gspo": gspo, "cispo": cispo}

# (raw ratio [rows, tokens], mask [rows, tokens], low, high) -> weights [rows, tokens]
Correction = Callable[[Tensor, Tensor, float, float], Tensor]

CORRECTIONS: dict[str, Correction] = {
    "tis": truncated_importance_sampling,
    "icepop": icepop,
    "sequence_mask": sequence_mask,
}
