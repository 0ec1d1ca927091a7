"""What DAPO adds to the sampling (Yu et al. 2025, arXiv:2503.14476): which prompts teach, and the price of length."""

import torch
from torch import Tensor


def informative_groups(scores: Tensor, groups: Tensor) -> Tensor:
    """Dynamic sampling, section 3.2: whether the responses to a prompt differ in score, so that any one has an
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
    """Soft overlong punishment, section 3.4, equation 13: nothing up to `max_length - buffer` tokens, then linearly
    down to -`factor` at `max_length`.

    Args:
        lengths: [rows] int64, tokens of each response.
        max_length, buffer: tokens, 0 < buffer <= max_length.

    Returns:
        [rows] float32, to add to the scores.
    """
    excess = lengths - (max_length - buffer)
    return -(excess / buffer).clamp(0.0, 1.0) * factor
