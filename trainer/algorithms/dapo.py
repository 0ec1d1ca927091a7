"""Dynamic sampling and the length penalty of DAPO (Yu et al. 2025, arXiv:2503.14476)."""

import torch
from torch import Tensor


def informative_groups(scores: Tensor, groups: Tensor) -> Tensor:
    """Whether the responses to a prompt differ in score (dynamic sampling, section 3.2).

    With equal scores, no response has a group-relative advantage.

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
    """Penalty for long responses (soft overlong punishment, section 3.4, equation 13).

    0 up to `max_length - buffer` tokens, then linear down to -`factor` at `max_length`.

    Args:
        lengths: [rows] int64, tokens of each response.
        max_length, buffer: tokens, 0 < buffer <= max_length.

    Returns:
        [rows] float32, to add to the scores.
    """
    excess = lengths - (max_length - buffer)
    return -(excess / buffer).clamp(0.0, 1.0) * factor
