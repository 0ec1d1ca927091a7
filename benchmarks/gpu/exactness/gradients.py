"""Log-probs with gradients by the shared operators, from the separate weights of a Transformers model.

Only the forward pass must have the engine's bits. Backward passes use torch's products and FlashAttention 2.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.exactness.forward import Operators, head_width
from benchmarks.gpu.exactness.operators import flash_attention, rotated
from benchmarks.gpu.exactness.sampling import Line

NUMBERS_PER_CHUNK = 2**28  # of logits


def norm_gradient(gradient: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide, by_output = x.float(), gradient.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    unit = wide * scale
    by_unit = by_output * weight.float()
    by_x = scale * (by_unit - unit * (by_unit * unit).mean(-1, keepdim=True))
    return by_x.to(x.dtype), (by_output * unit).sum(0).to(weight.dtype)


def rope_gradient(gradient: Tensor, cosine: Tensor, sine: Tensor, width: int) -> Tensor:
    return rotated(gradient, cosine, -sine, width)


def silu_gradient(gradient: Tensor, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    sigmoid = torch.sigmoid(gate)
    wide = gradient.float()
    by_gate = wide * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat((by_gate, wide * gate * sigmoid), dim=-1).to(gate_up.dtype)


def logits_gradient(logits: Tensor, targets: Tensor, gradient: Tensor) -> Tensor:
    chosen = torch.arange(logits.shape[-1], device=logits.device) == targets.unsqueeze(-1)
    return (gradient.unsqueeze(-1) * (chosen.float() - logits.float().softmax(-1))).to(logits.dtype)


FORMULAS: dict[str, Callable[..., Any]] = {
    "norm": norm_gradient,
    "rope": rope_gradient,
    "silu": silu_gradient,
    "logits": logits_gradient,
}
# As written, or compiled.
GRADIENTS = dict(FORMULAS)


class Product(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, product: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        result: Tensor = product(x, weight, bias)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        by_bias = gradient.sum(0, dtype=torch.float32).to(weight.dtype) if ctx.has_bias else None
        return gradient @ weight, gradient.t() @ x, by_bias, None


class Norm(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, norm: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        result: Tensor = norm(x, weight, eps)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return *GRADIENTS["norm"](gradient, *ctx.saved_tensors, ctx.eps), None, None


class Rope(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, line: Line, width: int, cache: Tensor, rope: Any) -> Any:
        ctx.save_for_backward(line.positions, cache)
        ctx.width = width
        return rope(line.positions, query, key, width, cache)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        positions, cache = ctx.saved_tensors
        cosine, sine = cache[positions].float().unsqueeze(-2).chunk(2, dim=-1)
        return *(GRADIENTS["rope"](part, cosine, sine, ctx.width) for part in gradients), None, None, None, None


class Silu(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, silu: Any) -> Tensor:
        ctx.save_for_backward(gate_up)
        result: Tensor = silu(gate_up)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return GRADIENTS["silu"](gradient, *ctx.saved_tensors), None


class Attention(torch.autograd.Function):  # type: ignore[misc]
    """FlashAttention 3 of vLLM forward; vLLM builds no backward pass, and that of torch takes the same sums."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, line: Line, scale: float) -> Tensor:
        out, sums = flash_attention(query, key, value, line.bounds, scale, with_lse=True)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.bounds, ctx.scale = line.bounds, scale
        result: Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, sums = ctx.saved_tensors
        bounds, no_dropout = ctx.bounds, torch.zeros(2, dtype=torch.uint64, device=out.device)
        found = torch.ops.aten._flash_attention_backward(
            *(gradient.contiguous(), query, key, value, out, sums),
            *(bounds.offsets, bounds.offsets, bounds.longest, bounds.longest, 0.0, True),
            *(no_dropout, torch.empty(0, device=out.device)),
            scale=ctx.scale,
            window_size_left=-1,
            window_size_right=0,
        )
        return *found, None, None


class HeadLogProbs(torch.autograd.Function):  # type: ignore[misc]
    """By chunks of tokens; the backward pass computes the logits again, by torch's product."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chosen: Operators) -> Tensor:
        ctx.save_for_backward(hidden, weight, targets)
        ctx.chunk = max(1, NUMBERS_PER_CHUNK // len(weight))
        parts = zip(hidden.split(ctx.chunk), targets.split(ctx.chunk), strict=True)
        return torch.cat([chosen.log_probs(chosen.product(part, weight, None), ids, 1.0) for part, ids in parts])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets = ctx.saved_tensors
        by_hidden, by_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, len(hidden), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            part = GRADIENTS["logits"](functional.linear(hidden[rows], weight), targets[rows], gradient[rows])
            by_hidden[rows] = part @ weight
            if part.dtype == torch.float32:
                by_weight += part.t() @ hidden[rows]
            else:
                torch.addmm(by_weight, part.t(), hidden[rows], out_dtype=torch.float32, out=by_weight)
        return by_hidden, by_weight.to(weight.dtype), None, None


def trained_log_probs(language_model: Any, chosen: Operators, line: Line, cache: Tensor) -> Tensor:
    """Of all response tokens at temperature 1, with gradients."""
    config, decoder = language_model.config, language_model.model
    width, eps = head_width(config), config.rms_norm_eps

    def product(module: Any, x: Tensor) -> Tensor:
        result: Tensor = Product.apply(x, module.weight, module.bias, chosen.product)
        return result

    hidden = functional.embedding(line.ids, decoder.embed_tokens.weight)
    for layer in decoder.layers:
        x = Norm.apply(hidden, layer.input_layernorm.weight, eps, chosen.norm)
        attention, mlp = layer.self_attn, layer.mlp
        query, key, value = (product(part, x) for part in (attention.q_proj, attention.k_proj, attention.v_proj))
        query, key = Rope.apply(query, key, line, width, cache, chosen.rope)
        parts = [tensor.reshape(len(tensor), -1, width) for tensor in (query, key, value)]
        if chosen.attention is flash_attention:
            attended = Attention.apply(*parts, line, width**-0.5)
        else:
            attended = chosen.attention(*parts, line.bounds, width**-0.5)
        hidden = hidden + product(attention.o_proj, attended.flatten(1))
        x = Norm.apply(hidden, layer.post_attention_layernorm.weight, eps, chosen.norm)
        gate_up = torch.cat((product(mlp.gate_proj, x), product(mlp.up_proj, x)), dim=-1)
        hidden = hidden + product(mlp.down_proj, Silu.apply(gate_up, chosen.silu))
    hidden = Norm.apply(hidden, decoder.norm.weight, eps, chosen.norm)
    result: Tensor = HeadLogProbs.apply(hidden[line.predicting], language_model.lm_head.weight, line.targets, chosen)
    return result
