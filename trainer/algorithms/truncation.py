"""Truncated sampling: only the likeliest tokens may be sampled (top-k; top-p: Holtzman et al. 2020, arXiv:1904.09751;
min-p: Nguyen et al. 2024, arXiv:2407.01082)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Truncation:
    """Which tokens may be sampled. The defaults allow all of them.

    In vLLM's order: `min_p` keeps tokens with at least that share of the largest probability, `top_k` the k likeliest,
    `top_p` the fewest of those that hold this share of their probability. The likeliest token always stays.
    """

    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0

    @property
    def smallest_mass(self) -> float:
        """A lower bound of the probability that the allowed tokens had before the truncation."""
        return self.top_p if self.top_k is None and self.min_p == 0 else 0.0


WHOLE = Truncation()


def truncated(log_probs: Tensor, truncations: Sequence[Truncation]) -> Tensor:
    """Log-probs of the truncated distributions, renormalised; -inf for tokens that may not be sampled.

    Args:
        log_probs: [rows, vocabulary] float32, normalised; truncations: one for each row.

    Returns:
        [rows, vocabulary].
    """
    size = log_probs.shape[1]
    column = log_probs.new_tensor
    top_p = column([truncation.top_p for truncation in truncations]).unsqueeze(1)
    top_k = column([truncation.top_k or size for truncation in truncations]).unsqueeze(1)
    min_p = column([truncation.min_p for truncation in truncations]).unsqueeze(1)
    ordered, tokens = log_probs.sort(dim=1, descending=True, stable=True)
    allowed = (ordered >= ordered[:, :1] + min_p.log()) & (column(range(size)) < top_k)
    kept = ordered.masked_fill(~allowed, float("-inf")).log_softmax(dim=1)
    before = kept.exp().cumsum(dim=1) - kept.exp()  # the probability of all likelier tokens
    allowed &= (before < top_p) | (top_p == 1)
    kept = ordered.masked_fill(~allowed, float("-inf")).log_softmax(dim=1)
    return kept.new_empty(kept.shape).scatter(1, tokens, kept)
