"""How many drafted tokens a step accepts, where a token is sampled in the place of each and after the last."""

import torch
from torch import Tensor


def accepted_tokens(sampled: Tensor, inputs: Tensor, first: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The tokens that a step gives to each response, of shape (responses, width), and how many of these count.

    `sampled` has a token for each row of logits, `inputs` the token at whose place the row is, both of shape (rows,).
    The rows of response i are those from `first[i]` to `first[i + 1]`, at most `width`.
    """
    rows = first[:-1, None] + torch.arange(width, device=first.device)
    tokens = sampled[rows.clamp(max=len(sampled) - 1)]
    following = inputs[(rows + 1).clamp(max=len(inputs) - 1)]
    accepted = (tokens == following) & (rows + 1 < first[1:, None])
    return tokens, accepted.cumprod(dim=1).sum(dim=1) + 1
