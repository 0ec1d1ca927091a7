"""The operators on NVIDIA GPUs, for engine and trainer alike: vLLM's kernels, and one of our own.

Imports Triton and vLLM, so it is imported where it is used. Measured in benchmarks/measured/exactness.md.
"""

from functools import cache
from typing import Any

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
from torch import Tensor
from vllm import _custom_ops
from vllm.v1.worker.gpu.sample.gumbel import apply_temperature
from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs
from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

from trainer.models.exact.operators import Operators

try:  # vLLM 0.26 has it elsewhere
    from vllm.model_executor.determinism.batch_invariant import matmul_kernel_persistent
except ModuleNotFoundError:
    from vllm.model_executor.layers.batch_invariant import matmul_kernel_persistent

# Rows, columns and depth of a tile, stages, warps; from large to small. All add in the same order.
TILES = ((128, 256, 64, 3, 8), (64, 128, 128, 3, 4), (64, 64, 128, 4, 4), (64, 32, 128, 5, 4))
FEW_ROWS, TILES_FOR_FEW = 32, ((16, 64, 128, 4, 4), (16, 16, 256, 4, 2))
ENOUGH_TILES = 90  # for a chip of 132 multiprocessors
# vLLM pads the matrix of the head, and with it the rows of logits, to a multiple of this.
HEAD_MULTIPLE = 64


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    sum_ptr,
    x_stride,
    width,
    epsilon,
    BLOCK: tl.constexpr,  # noqa: N803
    ADDS: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if ADDS:
        residual = tl.load(residual_ptr + row * width + columns, mask=mask, other=0.0).to(tl.float32)
        total = (x + residual).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * width + columns, total, mask=mask)
        x = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / width + epsilon)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + columns, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=mask)


def norm(x: Tensor, weight: Tensor, epsilon: float, residual: Tensor | None = None) -> Any:
    """The RMS norm of x [..., width], or that of the rounded x + residual beside this sum.

    One program a row, whereas vLLM's kernel divides the sum of a row otherwise for fewer than 256 rows.
    """
    flat = x.reshape(-1, x.shape[-1])
    out = torch.empty(flat.shape, dtype=x.dtype, device=x.device)
    total = out if residual is None else torch.empty_like(out)
    block = 1 << (flat.shape[1] - 1).bit_length()
    _norm_kernel[(len(flat),)](
        *(flat, flat if residual is None else residual.reshape(flat.shape), weight, out, total),
        *(flat.stride(0), flat.shape[1], epsilon),
        BLOCK=block,
        ADDS=residual is not None,
        num_warps=4 if block <= 2048 else 8,
    )
    return out.view(x.shape) if residual is None else (out.view(x.shape), total.view(x.shape))


@cache
def _product_kernel() -> Any:
    """vLLM's persistent kernel, compiled once for all numbers of rows instead of thrice."""
    return triton.jit(matmul_kernel_persistent.fn, do_not_specialize=["M"])


@cache
def _multiprocessors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, tile: tuple[int, int, int, int, int] | None = None
) -> Tensor:
    """x weight^T + bias, rounded once, with the largest tiles of which there are enough."""
    flat, transposed = x.reshape(-1, x.shape[-1]), weight.t()
    (n, k), m = weight.shape, len(flat)
    tiles = TILES_FOR_FEW if m <= FEW_ROWS else TILES
    enough = [t for t in tiles if -(-m // t[0]) * -(-n // t[1]) >= ENOUGH_TILES]
    rows, columns, depth, stages, warps = tile or (enough or tiles[-1:])[0]
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    multiprocessors = _multiprocessors(x.device.index)
    kernel = _product_kernel()
    # vLLM 0.26's kernel knows no stride of the bias.
    bias_stride = () if "stride_bias" not in kernel.arg_names else (1 if bias is None else bias.stride(0),)
    kernel[(min(multiprocessors, -(-m // rows) * -(-n // columns)),)](
        *(flat, transposed, out, bias, m, n, k),
        *(flat.stride(0), flat.stride(1), transposed.stride(0), transposed.stride(1), out.stride(0), out.stride(1)),
        *bias_stride,
        BLOCK_SIZE_M=rows,
        BLOCK_SIZE_N=columns,
        BLOCK_SIZE_K=depth,
        GROUP_SIZE_M=8,
        NUM_SMS=multiprocessors,
        A_LARGE=flat.numel() > 2**31,
        B_LARGE=weight.numel() > 2**31,
        C_LARGE=out.numel() > 2**31,
        HAS_BIAS=bias is not None,
        num_stages=stages,
        num_warps=warps,
    )
    return out.view(*x.shape[:-1], n)


def rope(positions: Tensor, query: Tensor, key: Tensor, width: int, table: Tensor) -> tuple[Tensor, Tensor]:
    """vLLM's rotation, which works in place, on copies."""
    query, key = query.clone(), key.clone()
    _custom_ops.rotary_embedding(positions, query, key, width, table, True)
    return query, key


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    """vLLM's FlashAttention 3, without splits over keys. vLLM builds no backward pass; torch's takes the same sums."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, bounds: tuple[Tensor, Tensor, int, int]
    ) -> Tensor:
        query_offsets, key_offsets, most_queries, most_keys = bounds
        out, sums = flash_attn_varlen_func(
            *(query, key, value),
            max_seqlen_q=most_queries,
            cu_seqlens_q=query_offsets,
            max_seqlen_k=most_keys,
            cu_seqlens_k=key_offsets,
            softmax_scale=scale,
            causal=True,
            num_splits=1,
            fa_version=3,
            return_softmax_lse=True,
        )
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.bounds, ctx.scale = bounds, scale
        result: Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, sums = ctx.saved_tensors
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=out.device)
        gradients = torch.ops.aten._flash_attention_backward(
            *(gradient.contiguous(), query, key, value, out, sums),
            *(*ctx.bounds, 0.0, True),
            *(no_dropout, torch.empty(0, device=out.device)),
            scale=ctx.scale,
            window_size_left=-1,
            window_size_right=0,
        )
        return *gradients, None, None


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Tensor,
    max_length_q: int,
    max_length_k: int,
    visible: Tensor | None = None,
    among_visible: Tensor | None = None,  # noqa: ARG001 - a query sees all keys of its sequence up to itself
) -> Tensor:
    """Causal attention on a packed line; see `trainer.models.attention.packed_attention`."""
    if visible is not None:
        key, value = key[visible], value[visible]
    bounds = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    output: Tensor = _Attention.apply(query, key, value, scale, bounds)
    return output


def log_probs(logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
    """Those of vLLM's second model runner; divided by the temperature, logits are rounded to their type."""
    if spare := -logits.shape[1] % HEAD_MULTIPLE:
        # In which order the kernel adds depends on the distance between rows.
        logits = torch.nn.functional.pad(logits, (0, spare))[:, : logits.shape[1]]
    if temperature != 1.0:
        which = torch.zeros(len(logits), dtype=torch.int32, device=logits.device)
        apply_temperature(logits, which, torch.full((1,), temperature, device=logits.device))
    sampled: Tensor = compute_token_logprobs(logits, token_ids.unsqueeze(-1)).squeeze(-1)
    return sampled


OPERATORS = Operators(product, norm, rope, attention, log_probs)
