"""The clipped loss of PPO's critic."""

import torch
from torch import Tensor

from trainer.algorithms.aggregation import token_mean


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip_range: float, token_count: int
) -> Tensor:
    """Half the squared error, the worse of a value and the same value held near its old one.

        v' = clip(v, v_old - clip_range, v_old + clip_range)        loss = mean(max((v - R)^2, (v' - R)^2)) / 2

    From the code of PPO's authors; see Huang et al. 2022, "The 37 Implementation Details of PPO", detail 9.

    Args:
        values, old_values, returns: [rows, tokens] float; only values needs a gradient.
        mask: [rows, tokens] bool.
        token_count: unmasked tokens of the global mini-batch.
    """
    held = values.clamp(old_values - clip_range, old_values + clip_range)
    return token_mean(torch.maximum((values - returns).square(), (held - returns).square()) / 2, mask, token_count)
