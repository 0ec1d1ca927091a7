"""Off-policy correction of a run: importance weights and rejection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.algorithms.off_policy.importance import raw_ratio, sequence_ratio
from trainer.algorithms.off_policy.rejection import Bound, Criterion, accepted
from trainer.algorithms.rows import Correction

if TYPE_CHECKING:
    from torch import Tensor


class Corrected(NamedTuple):
    """Each [rows, tokens]: the weight of each token's policy loss, None without a correction; where the correction
    bounded it; which tokens train; and the ratio trainer / engine."""

    weights: Tensor | None
    bounded: Tensor
    accepted: Tensor
    ratio: Tensor


@dataclass(frozen=True)
class OffPolicyCorrection:
    """The weights of `correction`, None for no weights, and the rejection criteria with their bounds."""

    correction: Correction | None
    parameters: Mapping[str, Any]
    normalize: bool
    rejection: Mapping[Criterion, Bound]

    def apply(self, log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Corrected:
        """Weights and accepted tokens, without a gradient.

        Args:
            log_probs, rollout_log_probs: [rows, tokens] of the learning policy and of the one that sampled.
            mask: [rows, tokens] bool.
        """
        log_probs = log_probs.detach()
        ratio = raw_ratio(log_probs, rollout_log_probs)
        weights, bounded = None, mask & False
        if self.correction is not None:
            weights = self.correction.weights(ratio, mask, **self.parameters)
            bounded = mask & (weights != unbounded_weights(self.correction, ratio, mask))
            if self.normalize:
                weights = normalized(weights, mask, self.correction.sequence_level)
        return Corrected(weights, bounded, accepted(log_probs, rollout_log_probs, mask, self.rejection), ratio)


def unbounded_weights(correction: Correction, ratio: Tensor, mask: Tensor) -> Tensor:
    """The weights inside the bounds of a correction: [rows, tokens], or [rows, 1] if they are those of responses."""
    if correction.masks_only:
        return ratio.new_ones(len(ratio), 1)
    return sequence_ratio(ratio, mask) if correction.sequence_level else ratio


def normalized(weights: Tensor, mask: Tensor, sequence_level: bool) -> Tensor:
    """The weights divided by their mean: over all unmasked tokens, or over all responses for weights per response.

    Args:
        weights: [rows, tokens], 0 where masked; mask: [rows, tokens] bool.
    """
    if sequence_level:
        lengths = mask.sum(dim=1)
        mean = (weights.sum(dim=1) / lengths.clamp(min=1)).sum() / (lengths > 0).sum().clamp(min=1)
    else:
        mean = weights.sum() / mask.sum().clamp(min=1)
    return weights / mean if mean > 1e-8 else weights
