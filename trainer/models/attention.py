"""Causal attention within each sequence of a packed line, registered with Transformers as `packed`.

On GPUs it uses torch's variable-length FlashAttention. On CPU and in float32 it pads the sequences on the right and
uses torch's scaled dot-product attention: under a causal mask no token sees the padding after it.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

NAME = "packed"
# torch 2.11 accepts grouped key-value heads; later releases need a flag.
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
    """Attention of one packed line. Transformers calls it in each layer.

    Args:
        query: [1, heads, tokens, width]; key, value: [1, key-value heads, tokens, width].
        attention_mask: must be None; the sequence bounds replace it.
        sliding_window: the number of tokens that a token sees, including itself; None: all tokens before it.
        cu_seq_lens_q: [sequences + 1] int32, the sequence bounds; max_length_q: the longest sequence.

    Returns:
        [1, tokens, heads, width], and None in place of attention weights, which are never computed.
    """
    if cu_seq_lens_q is None or max_length_q is None or attention_mask is not None:
        raise ValueError(f"{NAME} attention needs sequence bounds and no mask: call it through PackedRows")
    query, key, value = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    # FlashAttention does not support float32.
    attend = _variable_length if query.is_cuda and query.dtype != torch.float32 else _padded
    return attend(query, key, value, cu_seq_lens_q, max_length_q, scaling, sliding_window).unsqueeze(0), None


def _variable_length(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, longest: int, scale: float | None, window: int | None
) -> Tensor:
    bounds = (-1 if window is None else window - 1, 0)
    return varlen_attn(
        query, key, value, offsets, offsets, longest, longest, scale=scale, window_size=bounds, **_GROUPED_HEADS
    )


def _padded(
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
