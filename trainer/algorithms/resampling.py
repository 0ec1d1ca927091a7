"""Resampling of a step's responses by score (PF-PPO: Shen et al. 2024, arXiv:2409.06957)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Generator, Tensor

Resampling = Literal["none", "power", "max_min", "max_random"]


def power(scores: Tensor, exponent: float) -> Tensor:
    """|R|^exponent: [rows]."""
    return scores.abs().pow(exponent)


def max_min(scores: Tensor, _exponent: float) -> Tensor:
    """1 for the highest and the lowest score of the step, 0 for the others: [rows]."""
    return ((scores == scores.max()) | (scores == scores.min())).to(scores.dtype)


def max_random(scores: Tensor, _exponent: float) -> Tensor:
    """0.4 for the highest score of the step, 0.1 for the others: [rows]."""
    return 0.1 + 0.3 * (scores == scores.max()).to(scores.dtype)


_WEIGHTS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "power": power,
    "max_min": max_min,
    "max_random": max_random,
}


def resampled_rows(
    scores: Tensor, resampling: Resampling, exponent: float, generator: Generator, count: int | None = None
) -> Tensor:
    """`count` row indices, by default as many as there are rows, drawn with replacement in proportion to the weights of
    their scores.

    Args:
        scores: [rows] float, with the penalty for long responses and without a KL.

    Returns:
        [count] int64.
    """
    weights = _WEIGHTS[resampling](scores, exponent) + 1e-8
    return weights.multinomial(count or len(scores), replacement=True, generator=generator)
