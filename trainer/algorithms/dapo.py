"""DAPO (Yu et al. 2025, arXiv:2503.14476): informative prompts and the penalty for long responses."""

import torch
from torch import Tensor


def informative_groups(scores: Tensor, groups: Tensor) -> Tensor:
    """Dynamic sampling, section 3.2: whether the responses to a prompt differ in score. Otherwise none of them has an
    advantage.

    Args:
        scores: [rows] float.
        groups: [rows] int64, equal for the responses to one prompt.

    Returns:
        [rows] bool, equal for the responses to one prompt.
    """
    count = int(groups.max()) + 1
    lowest = torch.full((count,), torch.inf, dtype=scores.dtype).scatter_reduce(0, groups, scores, "amin")
    highest = torch.full((count,), -torch.inf, dtype=scores.dtype).scatter_reduce(0, groups, scores, "amax")
    return (highest > lowest)[groups]


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int, factor: float) -> Tensor:
    """Soft overlong punishment, section 3.4, equation 13: 0 up to `max_length - buffer` tokens, then linearly
    down to -`factor` at `max_length`.

    Args:
        lengths: [rows] int64, tokens of each response.
        max_length, buffer: tokens, 0 < buffer <= max_length.

    Returns:
        [rows] float32, to add to the scores.
    """
    excess = lengths - (max_length - buffer)
    return -(excess / buffer).clamp(0.0, 1.0) * factor
