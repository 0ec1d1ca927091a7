"""Clip-Cov: keeps entropy up by leaving out some tokens that would lower it most."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.algorithms.losses.clipping import RANGE, bounds, clipped_surrogate
from trainer.algorithms.losses.covariance import covariances
from trainer.algorithms.off_policy.importance import log_ratio
from trainer.algorithms.rows import PolicyLoss, TokenLoss
from trainer.rows import Parameter

if TYPE_CHECKING:
    from torch import Tensor


def clip_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_ratio: float,
    clip_ratio_low: float | None,
    clip_ratio_high: float | None,
    clip_cov_ratio: float,
    clip_cov_low: float,
    clip_cov_high: float,
) -> TokenLoss:
    """The clipped surrogate without some tokens of large covariance (Cui et al. 2025, arXiv:2505.22617, 4.2).

    Of the unclipped tokens whose covariance of log-prob and advantage is between `clip_cov_low` and `clip_cov_high`, a
    share `clip_cov_ratio` of all tokens, at least one, is drawn at random and gets loss 0. The same rows always give
    the same draw, so a resumed run repeats it.

    Args: see `ppo`. Covariance and share refer to the rows given, those of a micro-batch.
    """
    import torch

    ratio = log_ratio(log_probs, old_log_probs).exp()
    surrogate = clipped_surrogate(ratio, advantages, *bounds(clip_ratio, clip_ratio_low, clip_ratio_high), dual=None)
    covariance = covariances(log_probs.detach(), advantages, mask)
    inside = (covariance > clip_cov_low) & (covariance < clip_cov_high)
    candidates = (inside & mask & ~surrogate.clipped).nonzero()
    tokens = int(mask.sum())
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(tokens))
    rows, columns = candidates[order[: max(1, int(clip_cov_ratio * tokens))].to(candidates.device)].unbind(dim=1)
    left_out = mask.new_zeros(mask.shape).index_put((rows, columns), mask.new_ones(()))
    return TokenLoss(surrogate.loss.masked_fill(left_out, 0.0), surrogate.clipped | left_out)


ROW = PolicyLoss(
    name="clip_cov",
    loss=clip_cov,
    parameters={
        **RANGE,
        "clip_cov_ratio": Parameter(
            type=float,
            default=0.0002,
            description="clip_cov: share of the tokens that are left out",
            constraints={"gt": 0, "le": 1},
        ),
        "clip_cov_low": Parameter(type=float, default=1.0, description="clip_cov: lower bound of their covariance"),
        "clip_cov_high": Parameter(type=float, default=5.0, description="clip_cov: upper bound of their covariance"),
    },
    per_micro_batch=True,
)
