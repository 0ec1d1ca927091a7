"""From a loss per token to one number: the sum of what every rank and micro-batch computes is the loss of all."""

from typing import NamedTuple

from torch import Tensor

from trainer.config.tree import Aggregation


class GlobalCount(NamedTuple):
    """What a *global* mini-batch holds, over all ranks: unmasked tokens, and responses with at least one of them."""

    tokens: int
    responses: int


def aggregate(values: Tensor, mask: Tensor, mode: Aggregation, count: GlobalCount) -> Tensor:
    """One scalar from a value per token; over any split into whole rows these scalars add up to that of the whole.

        token-mean            sum over tokens / all tokens                every token weighs the same
        token-sum             sum over tokens
        seq-mean-token-sum    sum over tokens / all responses             longer responses weigh more
        seq-mean-token-mean   sum of each response's mean / responses     every response weighs the same

    Dividing each part by its own count would weigh the tokens of short responses more (Yu et al. 2025,
    arXiv:2503.14476, 3.3); what the modes favour: Liu et al. 2025, arXiv:2503.20783, 3.1.

    Args:
        values: [rows, tokens] float.
        mask: [rows, tokens] bool; a row without an unmasked token counts for nothing.
        count: of the global mini-batch that the rows are a part of.
    """
    values = values.where(mask, 0.0)
    match mode:
        case "token-mean":
            return values.sum() / count.tokens
        case "token-sum":
            return values.sum()
        case "seq-mean-token-sum":
            return values.sum() / count.responses
        case "seq-mean-token-mean":
            return (values.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).sum() / count.responses


def token_mean(values: Tensor, mask: Tensor, token_count: int) -> Tensor:
    """`token-mean`, for metrics.

    Args:
        values: [rows, tokens] float.
        mask: [rows, tokens] bool.
        token_count: unmasked tokens of the global mini-batch.
    """
    return values.where(mask, 0.0).sum() / token_count
