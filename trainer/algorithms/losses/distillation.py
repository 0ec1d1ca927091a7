"""On-policy distillation: the policy learns from a teacher's log-probs of its own samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.algorithms.losses.kl import KlEstimator, kl_estimate
from trainer.algorithms.policy_losses.ppo import ppo

if TYPE_CHECKING:
    from torch import Tensor


def teacher_kl(log_probs: Tensor, teacher_log_probs: Tensor, estimator: KlEstimator, limit: float | None) -> Tensor:
    """KL(policy || teacher) per token, clamped to [-limit, limit]; see `kl_estimate`."""
    estimate = kl_estimate(log_probs, teacher_log_probs, estimator)
    return estimate if limit is None else estimate.clamp(-limit, limit)


def distillation_policy_loss(
    log_probs: Tensor, old_log_probs: Tensor, kl: Tensor, mask: Tensor, clip_ratio: float, clip_dual: float
) -> Tensor:
    """The clipped surrogate of `ppo` with minus the KL as the advantage of each token.

    With k1, its expected gradient at the old policy is that of the KL to the teacher (Agarwal et al. 2024,
    arXiv:2306.13649; Lu 2025, "On-Policy Distillation").

    Args:
        log_probs, old_log_probs, kl: [rows, tokens]; mask: [rows, tokens] bool.

    Returns:
        [rows, tokens].
    """
    return ppo(log_probs, old_log_probs, -kl.detach(), mask, clip_ratio, None, None, clip_dual).loss
