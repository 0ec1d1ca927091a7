"""Operators whose rows depend on nothing but themselves: an engine and a trainer that share them get the same bits.

On CPU a formula stands in for each kernel, for rehearsals.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

try:
    import triton  # type: ignore[import-not-found,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False


if HAS_TRITON:

    @triton.jit  # type: ignore[untyped-decorator]
    def _norm_kernel(  # type: ignore[no-untyped-def]
        x_ptr,
        residual_ptr,
        weight_ptr,
        out_ptr,
        sum_ptr,
        x_stride,
        width,
        eps,
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
        scale = tl.rsqrt(tl.sum(x * x, axis=0) / width + eps)
        weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * width + columns, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=mask)


def own_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Any:
    """RMS norm of x, or of the rounded x + residual, which is then returned too. One program a row."""
    flat = x.reshape(-1, x.shape[-1])
    out = torch.empty(flat.shape, dtype=x.dtype, device=x.device)
    total = out if residual is None else torch.empty_like(out)
    block = 1 << (flat.shape[1] - 1).bit_length()
    _norm_kernel[(len(flat),)](
        *(flat, flat if residual is None else residual.reshape(flat.shape), weight, out, total),
        *(flat.stride(0), flat.shape[1], eps),
        BLOCK=block,
        ADDS=residual is not None,
        num_warps=4 if block <= 2048 else 8,
    )
    return out.view(x.shape) if residual is None else (out.view(x.shape), total.view(x.shape))


def formula_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Any:
    total = x if residual is None else x + residual
    wide = total.float()
    out = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)
    return out if residual is None else (out, total)


def vllm_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Any:
    """vLLM's in its batch-invariant mode. Its fused kernel works in place, and sums otherwise below 256 rows."""
    from vllm.model_executor.layers.batch_invariant import rms_norm_batch_invariant as norm

    return norm(x, weight, eps) if residual is None else norm(x.clone(), weight, eps, residual=residual.clone())


# Rows, columns and depth of a tile, stages, warps; from large to small. All give the bits of cuBLAS without split-K.
TILES = ((128, 256, 64, 3, 8), (128, 128, 64, 3, 8), (64, 64, 64, 4, 4), (64, 32, 64, 4, 4))
ENOUGH_TILES = 100  # for a chip of 132 multiprocessors


@functools.cache
def _product_kernel() -> Any:
    """vLLM's persistent kernel, compiled once for all numbers of rows instead of thrice."""
    from vllm.model_executor.layers.batch_invariant import matmul_kernel_persistent as kernel

    return triton.jit(kernel.fn, do_not_specialize=["M"])


@functools.cache
def _multiprocessors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def tiled_product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, tile: tuple[int, int, int, int, int] | None = None
) -> Tensor:
    """x weight^T + bias, rounded once, by vLLM's kernel with the largest tiles of which there are enough."""
    flat, transposed = x.reshape(-1, x.shape[-1]), weight.t()
    (n, k), m = weight.shape, len(flat)
    enough = [t for t in TILES if -(-m // t[0]) * -(-n // t[1]) >= ENOUGH_TILES]
    rows, columns, depth, stages, warps = tile or (enough or TILES[-1:])[0]
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    multiprocessors = _multiprocessors(x.device.index)
    _product_kernel()[(min(multiprocessors, -(-m // rows) * -(-n // columns)),)](
        *(flat, transposed, out, bias, m, n, k),
        *(flat.stride(0), flat.stride(1), transposed.stride(0), transposed.stride(1), out.stride(0), out.stride(1)),
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


def torch_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return functional.linear(x, weight, bias)


def split_k(allowed: bool) -> None:
    """Lets cuBLAS split a long sum over multiprocessors, as by default, or not: then rows depend on themselves alone.

    torch can forbid it in cuBLASLt only.
    """
    torch.backends.cuda.preferred_blas_library("default" if allowed else "cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (allowed, allowed)
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = (allowed, allowed)


def rope_cache(length: int, width: int, base: float, device: str, dtype: torch.dtype) -> Tensor:
    """Cosines beside sines of the angles, [length, width]. On the GPU they are the bits of vLLM's, on CPU not all."""
    frequencies = 1.0 / base ** (torch.arange(0, width, 2, dtype=torch.float, device=device) / width)
    angles = torch.arange(length, dtype=torch.float, device=device).unsqueeze(1) * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype)


def vllm_rope(positions: Tensor, query: Tensor, key: Tensor, width: int, cache: Tensor) -> tuple[Tensor, Tensor]:
    from vllm import _custom_ops as ops

    query, key = query.clone(), key.clone()
    ops.rotary_embedding(positions, query, key, width, cache, True)
    return query, key


def rotated(x: Tensor, cosine: Tensor, sine: Tensor, width: int) -> Tensor:
    """In float32, rounded once: the bits of vLLM's kernel. Transformers rounds each product."""
    left, right = x.float().unflatten(-1, (-1, width)).chunk(2, dim=-1)
    turned = torch.cat((left * cosine - right * sine, right * cosine + left * sine), dim=-1)
    return turned.flatten(-2).to(x.dtype)


def wide_rope(positions: Tensor, query: Tensor, key: Tensor, width: int, cache: Tensor) -> tuple[Tensor, Tensor]:
    cosine, sine = cache[positions].float().unsqueeze(-2).chunk(2, dim=-1)
    return rotated(query, cosine, sine, width), rotated(key, cosine, sine, width)


def vllm_silu(gate_up: Tensor) -> Tensor:
    out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    torch.ops._C.silu_and_mul(out, gate_up)
    return out


def torch_silu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


@dataclass(frozen=True)
class Bounds:
    """Where the rows of a packed line begin and end."""

    offsets: Tensor  # [rows + 1] int32
    lengths: list[int]

    @classmethod
    def of(cls, lengths: list[int], device: str) -> "Bounds":
        ends = torch.tensor([0, *lengths], device=device).cumsum(0)
        return cls(ends.to(torch.int32), lengths)

    @property
    def longest(self) -> int:
        return max(self.lengths)


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, scale: float, with_lse: bool = False
) -> Any:
    """vLLM's FlashAttention 3 on a packed line, [tokens, heads, width], without splits over keys."""
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    return flash_attn_varlen_func(
        *(query, key, value),
        max_seqlen_q=bounds.longest,
        cu_seqlens_q=bounds.offsets,
        max_seqlen_k=bounds.longest,
        cu_seqlens_k=bounds.offsets,
        softmax_scale=scale,
        causal=True,
        num_splits=1,
        fa_version=3,
        return_softmax_lse=with_lse,
    )


def decoding_attention(
    query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: list[int], scale: float, longest_query: int
) -> Tensor:
    """The same kernel as a decoding step calls it: one query a row, keys and values [pages, page size, heads, width].

    Told that the longest row has one query, it drops the causal mask, and for heads of 64 then takes tiles of 192
    instead of 128 keys: sums of another order. Told of two, it computes as in a prefill.
    """
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    used = torch.tensor(lengths, dtype=torch.int32, device=query.device)
    return flash_attn_varlen_func(
        *(query, keys, values),
        max_seqlen_q=longest_query,
        cu_seqlens_q=torch.arange(len(lengths) + 1, dtype=torch.int32, device=query.device),
        max_seqlen_k=max(lengths),
        seqused_k=used,
        block_table=table,
        softmax_scale=scale,
        causal=True,
        window_size=[-1, -1],
        num_splits=1,
        fa_version=3,
    )


def formula_attention(query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, scale: float) -> Tensor:
    parts = []
    for row in zip(*(tensor.split(bounds.lengths) for tensor in (query, key, value)), strict=True):
        q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in row)
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        parts.append(found.squeeze(0).transpose(0, 1))
    return torch.cat(parts)


def vllm_log_probs(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """By the kernels of vLLM's second model runner; divided by the temperature, logits are rounded to their type."""
    from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

    if temperature != 1.0:
        from vllm.v1.worker.gpu.sample.gumbel import apply_temperature

        which = torch.zeros(len(logits), dtype=torch.int32, device=logits.device)
        apply_temperature(logits, which, torch.full((1,), temperature, device=logits.device))
    return compute_token_logprobs(logits, targets.unsqueeze(-1)).squeeze(-1)


def formula_log_probs(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    wide = logits.float() / temperature
    return wide.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - wide.logsumexp(dim=-1)
