"""The operators with gradients.

Only results must have the engine's bits: gradients are those of the formulas, by torch's products.
"""

from typing import Any

import torch
from torch import Tensor

from trainer.models.compiled import for_any_length
from trainer.models.exact.operators import Operators, angles_at, rotated


def norm_gradient(gradient: Tensor, x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The gradients by x and by the weight of an RMS norm (Zhang and Sennrich 2019, arXiv:1910.07467)."""
    wide, by_output = x.float(), gradient.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    unit = wide * scale
    by_unit = by_output * weight.float()
    by_x = scale * (by_unit - unit * (by_unit * unit).mean(-1, keepdim=True))
    return by_x.to(x.dtype), (by_output * unit).sum(0).to(weight.dtype)


def silu_gradient(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of silu(gate) * up by both."""
    wide, wide_gate = gradient.float(), gate.float()
    sigmoid = torch.sigmoid(wide_gate)
    by_gate = wide * up.float() * sigmoid * (1 + wide_gate * (1 - sigmoid))
    return by_gate.to(gate.dtype), (wide * wide_gate * sigmoid).to(up.dtype)


class Product(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, operators: Operators) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return operators.product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        by_bias = gradient.sum(0, dtype=torch.float32).to(weight.dtype) if ctx.has_bias else None
        return gradient @ weight, gradient.t() @ x, by_bias, None


class Norm(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float, operators: Operators) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.epsilon = epsilon
        return operators.norm(x, weight, epsilon)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        compute = for_any_length(norm_gradient, gradient.device.type)
        return *compute(gradient, *ctx.saved_tensors, ctx.epsilon), None, None


class Rope(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, positions: Tensor, width: int, table: Tensor, operators: Operators
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(positions, table)
        ctx.width = width
        return operators.rope(positions, query, key, width, table)

    @staticmethod
    def backward(ctx: Any, by_query: Tensor, by_key: Tensor) -> tuple[Tensor | None, ...]:
        turn = for_any_length(rotated, by_query.device.type)
        positions, table = ctx.saved_tensors
        cosine, sine = angles_at(table, positions)
        back = (cosine, -sine, ctx.width)
        return turn(by_query, *back), turn(by_key, *back), None, None, None, None


class SiluProduct(torch.autograd.Function):  # type: ignore[misc]
    """silu(gate) * up. Eager torch rounds in between and gives the bits of vLLM's kernel; compiled, it would not."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.nn.functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradients: tuple[Tensor, Tensor] = for_any_length(silu_gradient, gradient.device.type)(
            gradient, *ctx.saved_tensors
        )
        return gradients
