"""Causal attention within each sequence of a packed line, registered with Transformers as `packed`.

On GPUs it uses torch's variable-length FlashAttention. On CPU and in float32 it pads the sequences on the right and
uses torch's scaled dot-product attention: under a causal mask no token sees the padding after it. Neither knows soft
caps (Gemma 2) or sinks (gpt-oss). Sinks are added to what FlashAttention returns; otherwise attention is computed from
its formula, block by block.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import AuxRequest, varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from trainer.errors import DataError
from trainer.models.context_parallel import ContextGroup
from trainer.models.packing import coordinates, spread

NAME = "packed"
# torch 2.11 accepts grouped key-value heads; later releases need a flag.
_GROUPED_HEADS = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
# Number of scores in one block of the formula: 1 GiB in float32.
SCORES_PER_BLOCK = 2**28
# Why the formula was used in this process.
FORMULA_USED_FOR: set[str] = set()


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    visible: Tensor | None = None,
    among_visible: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of one packed line.

    Args:
        query: [1, heads, tokens, width]; key [1, key-value heads, tokens, width]; value the same with its own width.
        attention_mask, position_bias: must be None; the sequence bounds replace the mask.
        sliding_window: the number of tokens that a token sees, including itself; None: all tokens before it.
        softcap: scores become softcap tanh(score / softcap).
        s_aux: [heads], the sinks: each takes part in the softmax of its head and contributes no value.
        cu_seq_lens_q: [sequences + 1] int32, the sequence bounds; max_length_q: the longest sequence.
        cu_seq_lens_k, max_length_k: the same for the tokens that each sequence sees.
        visible, among_visible: see `PackedRows`; None if each sequence sees its own tokens only.

    Returns:
        [1, tokens, heads, width], and None in place of attention weights, which are never computed.

    Raises DataError if a family's layers do not pass the bounds on.
    """
    if cu_seq_lens_k is None or max_length_k is None or attention_mask is not None or position_bias is not None:
        raise DataError(
            f"{type(module).__name__} cannot attend within the rows of a packed line: it passes no bounds of the rows, "
            "or a mask or position biases of its own",
            hint="use another model family, such as Qwen3, Llama, Mistral, Gemma or Granite",
        )
    query, key, value = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    if visible is not None:
        key, value = key[visible], value[visible]
    # FlashAttention does not support float32. On AMD GPUs its log-sum-exp comes in another shape.
    flash = query.is_cuda and query.dtype != torch.float32 and softcap is None
    if flash and not (s_aux is not None and torch.version.hip):
        # The last tokens that a sequence sees are its own, as FlashAttention assumes of fewer queries than keys.
        lengths = cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k
        attended = _by_flash(query, key, value, lengths, scaling, sliding_window, s_aux)
        return attended.unsqueeze(0), None
    if visible is not None:  # as many queries as keys: those of a shared prompt again and again
        query = query[visible]
    line = (query, key, value, cu_seq_lens_k, max_length_k, scaling, sliding_window)
    formula = softcap is not None or s_aux is not None
    attended = _by_formula(*line, softcap, s_aux) if formula else _padded(*line)
    return (attended if among_visible is None else attended[among_visible]).unsqueeze(0), None


def context_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    s_aux: Tensor | None = None,
    context_group: ContextGroup | None = None,
    **given: Any,
) -> tuple[Tensor, None]:
    """`packed_attention`, of this rank's tokens of a line if a group of ranks computes it together. Transformers calls
    it in each layer."""
    if context_group is None:
        return packed_attention(module, query, key, value, attention_mask, s_aux=s_aux, **given)
    computed: tuple[Tensor, None] = _exchanging(
        context_group, module, query, key, value, attention_mask, s_aux, **given
    )
    return computed


# Left out of compiled layers, which might order the exchanges otherwise on each rank.
@torch.compiler.disable
def _exchanging(
    context: ContextGroup,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    sinks: Tensor | None,
    **given: Any,
) -> tuple[Tensor, None]:
    key, value = context.repeated(key), context.repeated(value)
    query, key, value = (context.heads_of_line(tensor) for tensor in (query, key, value))
    sinks = None if sinks is None else context.own_heads(sinks)
    attended, _ = packed_attention(module, query, key, value, attention_mask, s_aux=sinks, **given)
    return context.tokens_of_rank(attended), None


# Bounds of the queries' and the keys' sequences, and the longest of each.
_Lengths = tuple[Tensor | None, Tensor, int | None, int]


def _by_flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: _Lengths,
    scale: float | None,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    width, of_values = query.shape[-1], value.shape[-1]
    if of_values < width:  # the latent attention of DeepSeek; the kernels know one width
        value = pad(value, (0, width - of_values))
    bounds = (-1 if window is None else window - 1, 0)
    if sinks is None:
        attended = varlen_attn(query, key, value, *lengths, scale=scale, window_size=bounds, **_GROUPED_HEADS)
    else:
        attended = _with_sinks(query, key, value, sinks, lengths, scale, bounds)
    return attended[..., :of_values]


class _FlashWithSinks(torch.autograd.Function):  # type: ignore[misc]
    """FlashAttention whose softmax has one more term in its sum for each head.

    The output is the kernel's, scaled from its sum to the larger one. The kernel's backward pass computes weights from
    the log-sum-exp and subtracts the product of output and gradient: given the larger sum and the scaled output it
    gives the gradients of attention with sinks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor,
        lengths: _Lengths,
        scale: float | None,
        bounds: tuple[int, int],
    ) -> Tensor:
        output, lse = flash_forward(query, key, value, lengths, scale, bounds)
        with_sinks = torch.logaddexp(lse, sinks.float().unsqueeze(1))  # [heads, tokens]
        output = (output * (lse - with_sinks).exp().T.unsqueeze(-1)).to(output.dtype)
        ctx.save_for_backward(query, key, value, sinks, output, with_sinks)
        ctx.given = lengths, scale, bounds
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, output, lse = ctx.saved_tensors
        gradients = flash_backward(gradient.contiguous(), query, key, value, output, lse, *ctx.given)
        by_head = (gradient.float() * output.float()).sum(dim=-1).T  # [heads, tokens]
        of_sinks = -((sinks.float().unsqueeze(1) - lse).exp() * by_head).sum(dim=1)
        return *gradients, of_sinks.to(sinks.dtype), None, None, None


# Not in graphs, as torch's own operator.
_with_sinks = torch.compiler.disable(_FlashWithSinks.apply)


def flash_forward(
    query: Tensor, key: Tensor, value: Tensor, lengths: _Lengths, scale: float | None, bounds: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """The output, [tokens, heads, width], and the log-sum-exp of the scores, [heads, tokens] float32."""
    given = {"scale": scale, "window_size": bounds, "return_aux": AuxRequest(lse=True), **_GROUPED_HEADS}
    output, lse = varlen_attn(query, key, value, *lengths, **given)
    return output, lse


def flash_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    lengths: _Lengths,
    scale: float | None,
    bounds: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value. torch's public function takes no other log-sum-exp than its own."""
    random_state = torch.zeros(2, dtype=torch.uint64, device=query.device)  # nothing is dropped out
    unused = torch.empty(0, device=query.device)
    causal = bounds == (-1, 0)
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        *(gradient, query, key, value, output, lse, *lengths, 0.0, causal, random_state, unused),
        scale=scale,
        window_size_left=bounds[0],
        window_size_right=bounds[1],
    )
    return gradients


def _padded(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, longest: int, scale: float | None, window: int | None
) -> Tensor:
    tokens, mask = len(query), None
    if window is not None and window < longest:
        mask = _visible(slice(0, longest), slice(0, longest), window, query.device)
    query, key, value = (spread(tensor, offsets, longest).transpose(1, 2) for tensor in (query, key, value))
    padded = scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None, scale=scale, enable_gqa=True)
    return padded.transpose(1, 2)[coordinates(offsets, tokens)]


@torch.compiler.disable  # the number of blocks depends on the lengths
def _by_formula(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    longest: int,
    scale: float | None,
    window: int | None,
    cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    FORMULA_USED_FOR.update(name for name, given in (("soft caps", cap), ("sinks", sinks)) if given is not None)
    tokens, (heads, width), groups = len(query), query.shape[1:], key.shape[1]
    scale = width**-0.5 if scale is None else scale
    # [sequences, key-value heads, query heads of each, longest, width], and the same with 1 query head
    query = spread(query, offsets, longest).unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)
    key, value = (spread(part, offsets, longest).transpose(1, 2).unsqueeze(2) for part in (key, value))
    sinks = None if sinks is None else sinks.float().view(groups, -1, 1, 1)
    block = max(1, SCORES_PER_BLOCK // (len(query) * heads * longest))
    parts = []
    for start in range(0, longest, block):
        rows = slice(start, min(start + block, longest))
        columns = slice(0 if window is None else max(0, start - window + 1), rows.stop)
        mask = _visible(rows, columns, window, query.device)
        # Recomputed in the backward pass, so that the scores of only one block are in memory.
        parts.append(
            checkpoint(
                _attend,
                *(query[..., rows, :], key[..., columns, :], value[..., columns, :], mask, scale, cap, sinks),
                use_reentrant=False,
            )
        )
    padded = torch.cat(parts, dim=-2).permute(0, 3, 1, 2, 4).flatten(2, 3)
    return padded[coordinates(offsets, tokens)]


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, cap: float | None, sinks: Tensor | None
) -> Tensor:
    scores = (query @ key.transpose(-1, -2)).float() * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : key.shape[-2]]
    return weights.to(value.dtype) @ value


def _visible(rows: slice, columns: slice, window: int | None, device: torch.device) -> Tensor:
    """Which tokens (columns) each token (row) of a sequence sees, [rows, columns] bool."""
    distance = torch.arange(rows.start, rows.stop, device=device).unsqueeze(1) - torch.arange(
        columns.start, columns.stop, device=device
    )
    return (distance >= 0) & (distance < (rows.stop if window is None else window))


AttentionInterface.register(NAME, context_attention)
