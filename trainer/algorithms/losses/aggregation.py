"""Reduction of token losses to a scalar. The scalars of all ranks and micro-batches sum to the loss of the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]


class GlobalCount(NamedTuple):
    """Size of a mini-batch over all ranks: unmasked tokens, and responses. As in verl, these include responses that are
    masked entirely because they are truncated or rejected, but none that failed.
    """

    tokens: int
    responses: int


def aggregate(values: Tensor, mask: Tensor, mode: Aggregation, count: GlobalCount, scale_length: int = 1) -> Tensor:
    """Sum or weighted mean of token values. The results of any split into whole rows sum to the result of the whole.

        token-mean                sum over tokens / all tokens                every token has the same weight
        token-sum                 sum over tokens
        seq-mean-token-sum        sum over tokens / all responses             longer responses have more weight
        seq-mean-token-sum-norm   the same / scale_length                     as in Dr. GRPO
        seq-mean-token-mean       sum of each response's mean / responses     every response has the same weight

    Dividing each part by its own count would give tokens of short responses more weight (Yu et al. 2025,
    arXiv:2503.14476, 3.3). Liu et al. 2025, arXiv:2503.20783, 3.1, compare the modes.

    Args:
        values: [rows, tokens] float.
        mask: [rows, tokens] bool; a row without unmasked tokens adds 0.
        count: of the global mini-batch that contains the rows.
        scale_length: a constant number of tokens, usually the limit of a response.
    """
    values = values.where(mask, 0.0)
    responses = max(1, count.responses)
    match mode:
        case "token-mean":
            return values.sum() / max(1, count.tokens)
        case "token-sum":
            return values.sum()
        case "seq-mean-token-sum":
            return values.sum() / responses
        case "seq-mean-token-sum-norm":
            return values.sum() / responses / scale_length
        case "seq-mean-token-mean":
            return (values.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).sum() / responses
