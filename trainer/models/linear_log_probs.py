"""Log-probs and entropy computed from hidden states, with the logits of only one chunk of tokens in memory.

With a vocabulary of 150,000, the logits of 32k tokens take 10 GB in bfloat16, and autograd would keep several copies.
Here the backward pass recomputes the logits chunk by chunk, which costs one more matrix product.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import linear

from trainer.models.compiled import for_any_length
from trainer.models.exact.operators import Operators
from trainer.models.output_head import PLAIN, OutputHead


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    temperature: float,
    tokens_per_chunk: int,
    with_entropy: bool = True,
    bias: Tensor | None = None,
    head: OutputHead = PLAIN,
    operators: Operators | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy of softmax(logits / temperature), without storing all logits.

    Args:
        hidden: [tokens, width]; weight: [vocabulary, width]; both of the same float type.
        token_ids: [tokens] int64.
        with_entropy: False saves one of two passes over the logits; the entropy and its gradient are then 0.
        bias: [vocabulary], of the same type.
        head: what becomes of hidden weight^T + bias to give the logits.
        operators: compute the logits and the log-probs, from a head that gives the matrix's outputs as logits.

    Returns:
        log_probs, entropy: [tokens] float32.
    """
    if head.hidden_scale != 1.0:
        hidden = hidden * head.hidden_scale
    log_probs, entropy = _LinearLogProbs.apply(
        *(hidden, weight, bias, token_ids, head.tempered(temperature), tokens_per_chunk, with_entropy),
        *(operators, temperature),
    )
    return log_probs, entropy


def linear_squared_probabilities(
    hidden: Tensor,
    weight: Tensor,
    temperature: float,
    tokens_per_chunk: int,
    bias: Tensor | None = None,
    head: OutputHead = PLAIN,
) -> Tensor:
    """The sum of the squared probabilities of softmax(logits / temperature), [tokens] float32, without gradient.

    Args: see `linear_log_probs`.
    """
    tempered, squared = head.tempered(temperature), hidden.new_zeros(len(hidden), dtype=torch.float32)
    statistics = for_any_length(chunk_squared_probabilities, hidden.device.type)
    for rows in _chunks(len(hidden), tokens_per_chunk):
        squared[rows] = statistics(linear(hidden[rows] * head.hidden_scale, weight, bias), tempered)
    return squared


class _LinearLogProbs(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        token_ids: Tensor,
        head: OutputHead,
        tokens_per_chunk: int,
        with_entropy: bool,
        operators: Operators | None,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        statistics = for_any_length(chunk_statistics if with_entropy else chunk_log_probs, hidden.device.type)
        log_probs, normaliser, entropy = (hidden.new_zeros(len(hidden), dtype=torch.float32) for _ in range(3))
        for rows in _chunks(len(hidden), tokens_per_chunk):
            outputs = (linear if operators is None else operators.product)(hidden[rows], weight, bias)
            chunk = statistics(outputs, token_ids[rows], head)
            for kept, values in zip((log_probs, normaliser, entropy), chunk, strict=False):
                kept[rows] = values
            if operators is not None:
                log_probs[rows] = operators.log_probs(outputs, token_ids[rows], temperature)
        ctx.save_for_backward(hidden, weight, bias, token_ids, normaliser, entropy)
        ctx.head, ctx.tokens_per_chunk = head, tokens_per_chunk
        return log_probs, entropy

    @staticmethod
    def backward(  # type: ignore[no-untyped-def]
        ctx, log_prob_gradient: Tensor, entropy_gradient: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, token_ids, normaliser, entropy = ctx.saved_tensors
        gradient = for_any_length(output_gradient, hidden.device.type)
        hidden_gradient = torch.empty_like(hidden)
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        bias_gradient = torch.zeros_like(bias, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        for rows in _chunks(len(hidden), ctx.tokens_per_chunk):
            outputs_gradient = gradient(
                linear(hidden[rows], weight, bias),
                token_ids[rows],
                normaliser[rows],
                entropy[rows],
                log_prob_gradient[rows],
                entropy_gradient[rows],
                ctx.head,
            )
            torch.mm(outputs_gradient, weight, out=hidden_gradient[rows])
            if weight_gradient is not None:
                _add_product(weight_gradient, outputs_gradient.T, hidden[rows])
            if bias_gradient is not None:
                bias_gradient += outputs_gradient.sum(dim=0, dtype=torch.float32)
        by_weight = None if weight_gradient is None else weight_gradient.to(weight.dtype)
        by_bias = None if bias_gradient is None else bias_gradient.to(weight.dtype)
        return hidden_gradient, by_weight, by_bias, *(None,) * 6


def chunk_statistics(outputs: Tensor, token_ids: Tensor, head: OutputHead) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, log-normalisers and entropies of softmax(head.logits(outputs)), each [tokens] float32.

    outputs: [tokens, V], of the head's matrix.
    """
    log_probs, normaliser = chunk_log_probs(outputs, token_ids, head)
    logits = head.logits(outputs.float())
    mean = ((logits - normaliser.unsqueeze(-1)).exp() * logits).sum(dim=-1)
    return log_probs, normaliser, normaliser - mean


def chunk_log_probs(outputs: Tensor, token_ids: Tensor, head: OutputHead) -> tuple[Tensor, Tensor]:
    """The first two of `chunk_statistics`."""
    logits = head.logits(outputs.float())
    normaliser = logits.logsumexp(dim=-1)
    return logits.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1) - normaliser, normaliser


def chunk_squared_probabilities(outputs: Tensor, head: OutputHead) -> Tensor:
    """The sum of the squares of softmax(logits), [tokens] float32. outputs: [tokens, V], of the head's matrix."""
    logits = head.logits(outputs.float())
    return ((2 * logits).logsumexp(dim=-1) - 2 * logits.logsumexp(dim=-1)).exp()


def output_gradient(
    outputs: Tensor,
    token_ids: Tensor,
    normaliser: Tensor,
    entropy: Tensor,
    log_prob_gradient: Tensor,
    entropy_gradient: Tensor,
    head: OutputHead,
) -> Tensor:
    """The gradient with respect to the outputs of the head's matrix, [tokens, V] in their type.

    With p = softmax(logits), the gradient of the log-prob of y with respect to the logits is 1[y] - p, and the gradient
    of the entropy H is -p (log p + H).
    """
    logits = head.logits(outputs.float())
    log_p = logits - normaliser.unsqueeze(-1)
    p = log_p.exp()
    by_log_prob, by_entropy = log_prob_gradient.unsqueeze(-1), entropy_gradient.unsqueeze(-1)
    chosen = torch.arange(logits.shape[-1], device=logits.device) == token_ids.unsqueeze(-1)
    total = by_log_prob * (chosen.float() - p) - by_entropy * p * (log_p + entropy.unsqueeze(-1))
    return (head.slope(logits) * total).to(outputs.dtype)


def _chunks(length: int, size: int) -> Iterator[slice]:
    """Slices of nearly equal length, at most `size`, so that compiled code sees few sizes."""
    count = max(1, -(-length // size))
    step = max(1, -(-length // count))
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, accumulated in float32 for factors of any type."""
    if left.is_cuda and left.dtype != torch.float32:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(left.float(), right.float())
