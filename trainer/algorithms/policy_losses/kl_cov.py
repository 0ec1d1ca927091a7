"""KL-Cov: keeps entropy up by a penalty on the tokens that would lower it most."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.algorithms.losses.covariance import covariances
from trainer.algorithms.off_policy.importance import log_ratio
from trainer.algorithms.rows import PolicyLoss, TokenLoss
from trainer.rows import Parameter

if TYPE_CHECKING:
    from torch import Tensor


def kl_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    kl_cov_ratio: float,
    kl_cov_coefficient: float,
) -> TokenLoss:
    """The unclipped surrogate, with a penalty on some tokens (Cui et al. 2025, arXiv:2505.22617, 4.3).

        loss = -A r,    plus kl_cov_coefficient |log r| for the penalised tokens

    The penalised tokens are the share `kl_cov_ratio`, at least one, with the largest covariance of log-prob and
    advantage.

    Args: see `ppo`. Covariance and share refer to the rows given, those of a micro-batch.
    """
    difference = log_ratio(log_probs, old_log_probs)
    covariance = covariances(log_probs.detach(), advantages, mask).masked_fill(~mask, -float("inf"))
    count = min(covariance.numel(), max(1, int(kl_cov_ratio * int(mask.sum()))))
    highest = covariance.flatten().topk(count).indices
    penalised = mask.new_zeros(mask.numel()).index_fill(0, highest, True).view(mask.shape) & mask
    penalty = kl_cov_coefficient * difference.abs()
    return TokenLoss(-advantages * difference.exp() + penalty.where(penalised, 0.0), penalised)


ROW = PolicyLoss(
    name="kl_cov",
    loss=kl_cov,
    parameters={
        "kl_cov_ratio": Parameter(
            type=float,
            default=0.0002,
            description="kl_cov: share of the tokens that are penalised",
            constraints={"gt": 0, "le": 1},
        ),
        "kl_cov_coefficient": Parameter(
            type=float, default=0.1, description="kl_cov: weight of the penalty", constraints={"ge": 0}
        ),
    },
    per_micro_batch=True,
)
