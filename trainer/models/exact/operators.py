"""The operators of a layer, and formulas for them.

An operator whose rows depend on nothing but themselves gives a token the same bits in an engine, beside any others and
in any order, as in a trainer's pass over whole rows. `trainer/models/exact/kernels.py` has such operators for GPUs. The
formulas here define them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer.models.attention import packed_attention


@dataclass(frozen=True)
class Operators:
    """Results only; `trainer/models/exact/gradients.py` has the gradients.

    `product`: x [tokens, in], weight [out, in], bias [out] or None -> [tokens, out], rounded once.
    `norm`: x [tokens, width], weight [width], epsilon -> the RMS norm.
    `rope`: positions [tokens], query and key [tokens, heads x width], width of a head, table of `rope_table` -> both.
    `attention`: query, key, value [tokens, heads, width], scale, and `PackedRows.attention_arguments` by name
    -> [tokens, heads, width]; it alone brings its gradient.
    `log_probs`: logits [tokens, vocabulary], which it may change, ids [tokens], temperature -> [tokens] float32.
    """

    product: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    norm: Callable[[Tensor, Tensor, float], Tensor]
    rope: Callable[[Tensor, Tensor, Tensor, int, Tensor], tuple[Tensor, Tensor]]
    attention: Callable[..., Tensor]
    log_probs: Callable[[Tensor, Tensor, float], Tensor]


def rope_table(length: int, width: int, base: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Cosines beside sines of the angles of Su et al. 2021 (arXiv:2104.09864), [length, width].

    Computed on the GPU, these are the bits of vLLM's table; computed on CPU, not all are.
    """
    frequencies = 1.0 / base ** (torch.arange(0, width, 2, dtype=torch.float, device=device) / width)
    angles = torch.arange(length, dtype=torch.float, device=device).unsqueeze(1) * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype)


def rotated(x: Tensor, cosine: Tensor, sine: Tensor, width: int) -> Tensor:
    """Heads [tokens, heads x width] turned by angles [tokens, 1, width / 2], in float32 and rounded once.

    Transformers rounds each of the two products.
    """
    left, right = x.float().unflatten(-1, (-1, width)).chunk(2, dim=-1)
    turned = torch.cat((left * cosine - right * sine, right * cosine + left * sine), dim=-1)
    return turned.flatten(-2).to(x.dtype)


def angles_at(table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines for `rotated`, each [tokens, 1, width / 2] float32."""
    cosine, sine = table[positions].float().unsqueeze(-2).chunk(2, dim=-1)
    return cosine, sine


def _norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * weight.float()).to(x.dtype)


def _rope(positions: Tensor, query: Tensor, key: Tensor, width: int, table: Tensor) -> tuple[Tensor, Tensor]:
    angles = angles_at(table, positions)
    return rotated(query, *angles, width), rotated(key, *angles, width)


def _attention(query: Tensor, key: Tensor, value: Tensor, scale: float, **bounds: Any) -> Tensor:
    query, key, value = (part.transpose(0, 1).unsqueeze(0) for part in (query, key, value))
    attended, _ = packed_attention(nn.Identity(), query, key, value, None, scaling=scale, **bounds)
    return attended.squeeze(0)


def _log_probs(logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
    wide = logits.float() / temperature
    return wide.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1) - wide.logsumexp(dim=-1)


FORMULAS = Operators(functional.linear, _norm, _rope, _attention, _log_probs)
