"""Causal attention within each sequence of a packed line, as `packed` in Transformers' registry of attentions.

On GPUs it is torch's variable-length FlashAttention. On CPU, and in float32, the sequences are laid side by side,
padded on the right, for torch's scaled dot-product attention: under a causal mask no token sees the padding behind it.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

NAME = "packed"
# torch 2.11 takes fewer key-value heads as they are; later releases want to be told.
_GROUPED_HEADS = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def packed_attention(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of one packed line; what Transformers calls in each layer.

    Args:
        query: [1, heads, tokens, width]; key, value: [1, key-value heads, tokens, width].
        attention_mask: None, the sequences' bounds take its place.
        sliding_window: tokens that a token sees at most, itself included; all before it if None.
        cu_seq_lens_q: [sequences + 1] int32; max_length_q: no sequence is longer.

    Returns:
        [1, tokens, heads, width], and None for the attention weights, which never exist.
    """
    if cu_seq_lens_q is None or max_length_q is None or attention_mask is not None:
        raise ValueError(f"{NAME} attention needs a packed line's bounds and no mask: call it through PackedRows")
    query, key, value = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    # FlashAttention has no float32.
    attend = _variable_length if query.is_cuda and query.dtype != torch.float32 else _side_by_side
    return attend(query, key, value, cu_seq_lens_q, max_length_q, scaling, sliding_window).unsqueeze(0), None


def _variable_length(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, longest: int, scale: float | None, window: int | None
) -> Tensor:
    bounds = (-1 if window is None else window - 1, 0)
    return varlen_attn(
        query, key, value, offsets, offsets, longest, longest, scale=scale, window_size=bounds, **_GROUPED_HEADS
    )


def _side_by_side(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, longest: int, scale: float | None, window: int | None
) -> Tensor:
    lengths = offsets.diff().long()
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=query.device), lengths)
    column = torch.arange(len(query), device=query.device) - offsets[:-1].long()[sequence]

    def spread(packed: Tensor) -> Tensor:
        padded = packed.new_zeros(len(lengths), longest, *packed.shape[1:])
        return padded.index_put((sequence, column), packed).transpose(1, 2)

    mask = None
    if window is not None and window < longest:
        band = torch.ones(longest, longest, dtype=torch.bool, device=query.device)
        mask = band.tril() & band.triu(1 - window)
    padded = scaled_dot_product_attention(
        spread(query), spread(key), spread(value), mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )
    return padded.transpose(1, 2)[sequence, column]


AttentionInterface.register(NAME, packed_attention)
