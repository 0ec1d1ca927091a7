"""The clipped value loss of PPO."""

import torch
from torch import Tensor


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip_range: float | None) -> Tensor:
    """Half the squared error of the value or of its clipped version, whichever is larger.

        v' = clip(v, v_old - clip_range, v_old + clip_range)        loss = max((v - R)^2, (v' - R)^2) / 2

    Without a clip range, the loss is (v - R)^2 / 2. Source: the code of PPO's authors, described by Huang et al. 2022,
    "The 37 Implementation Details of PPO", detail 9.

    Args:
        values, old_values, returns: [rows, tokens] float; gradients flow through `values` only.

    Returns:
        [rows, tokens].
    """
    error = (values - returns).square()
    if clip_range is None:
        return error / 2
    clipped = values.clamp(old_values - clip_range, old_values + clip_range)
    return torch.maximum(error, (clipped - returns).square()) / 2
