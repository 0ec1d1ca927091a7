"""Which operators of vLLM, torch and this benchmark give the same bits, for any number of rows. Needs a GPU."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.common import Results, Shape
from benchmarks.gpu.exactness import operators as ops
from benchmarks.gpu.exactness.comparing import apart, milliseconds, reported, unequal
from benchmarks.gpu.exactness.operators import Bounds

ROWS = (1, 2, 3, 8, 13, 16, 17, 33, 64, 65, 96, 128, 129, 200, 255, 256, 257, 500, 512, 1024, 1500)
LENGTHS = [100, 1, 17, 600, 128, 129, 333, 255, 512, 900]
PAGE = 16


class Census:
    """Each method compares the variants of one operator on random numbers and adds a row."""

    def __init__(self, shape: Shape, results: Results) -> None:
        self._shape, self._results = shape, results
        self._generator = torch.Generator("cuda").manual_seed(0)

    def take(self) -> None:
        width = self._shape.hidden // self._shape.heads
        queries, keys = self._shape.heads * width, self._shape.key_value_heads * width
        hidden, intermediate = self._shape.hidden, self._shape.intermediate
        parts: dict[str, Callable[[], None]] = {
            "qkv_proj": lambda: self.product("qkv_proj", hidden, queries + 2 * keys, bias=True),
            "o_proj": lambda: self.product("o_proj", queries, hidden),
            "gate_up_proj": lambda: self.product("gate_up_proj", hidden, 2 * intermediate),
            "down_proj": lambda: self.product("down_proj", intermediate, hidden),
            "head": lambda: self.product("head", hidden, self._shape.vocabulary),
            "norm": lambda: self.norm(hidden),
            "attention": lambda: self.attention(self._shape.heads, self._shape.key_value_heads, width),
            "rope": lambda: self.rope(queries, keys, width),
            "silu": lambda: self.silu(intermediate),
            "log-probs": self.log_probs,
        }
        for name, compare in parts.items():
            with reported(self._results, name):
                compare()

    def product(self, name: str, inner: int, outer: int, bias: bool = False) -> None:
        from vllm.model_executor.layers.batch_invariant import linear_batch_invariant

        many = 2048 if outer > 100_000 else 8192
        x, weight = self._normal(many, inner), self._normal(outer, inner) * 0.02
        offset = self._normal(outer) if bias else None
        expected = ops.tiled_product(x, weight, offset)
        tiles = {}
        for tile in ops.TILES:
            product = partial(ops.tiled_product, weight=weight, bias=offset, tile=tile)
            tiles[f"{tile[0]}x{tile[1]}"] = _varying(product, x, expected)
        torch_product = partial(ops.torch_product, weight=weight, bias=offset)
        fitting = partial(ops.tiled_product, weight=weight, bias=offset)
        found: dict[str, int] = {}
        for allowed in (True, False):
            ops.split_k(allowed)
            name_of = "cuBLAS" if allowed else "cuBLAS without split-K"
            found[name_of] = _varying(torch_product, x, expected)
        stock = unequal(linear_batch_invariant(x, weight, None), ops.tiled_product(x, weight))
        times = {
            str(size): {
                "cuBLAS without split-K": milliseconds(partial(torch_product, x[:size])),
                "tiles": milliseconds(partial(fitting, x[:size])),
            }
            for size in (64, 512, many)
        }
        self._results.add(
            operator=name, of=expected.numel(), unequal={**found, **tiles, "vLLM's, no bias": stock}, milliseconds=times
        )

    def norm(self, width: int) -> None:
        x, residual, weight = self._normal(2048, width), self._normal(2048, width) * 3, self._normal(width)
        found = {}
        for name, norm in {"own": ops.own_norm, "vLLM's": ops.vllm_norm}.items():
            whole = norm(x, weight, 1e-6, residual)[0]
            found[name] = {
                rows: bad
                for rows in ROWS
                if (bad := unequal(norm(x[:rows], weight, 1e-6, residual[:rows])[0], whole[:rows]))
            }
        fused, total = ops.own_norm(x, weight, 1e-6, residual)
        alone = unequal(ops.own_norm(total, weight, 1e-6), fused)
        self._results.add(operator="norm", of=x.numel(), varies_at_rows=found, own_unequal_without_residual=alone)

    def attention(self, heads: int, groups: int, width: int) -> None:
        scale, bounds = width**-0.5, Bounds.of(LENGTHS, "cuda")
        query, key, value = (self._normal(sum(LENGTHS), count, width) for count in (heads, groups, groups))
        expected = ops.flash_attention(query, key, value, bounds, scale)
        rows = zip(query.split(LENGTHS), key.split(LENGTHS), value.split(LENGTHS), strict=True)
        alone = [ops.flash_attention(q, k, v, Bounds.of([len(q)], "cuda"), scale) for q, k, v in rows]
        # Every row's cache in pages of its own; its last token, one in the middle and an early one are decoded.
        count = -(-max(LENGTHS) // PAGE)
        table = torch.arange(len(LENGTHS) * count, dtype=torch.int32, device="cuda").view(-1, count)
        keys, values = (self._paged(tensor, count) for tensor in (key, value))
        begins = bounds.offsets[:-1].tolist()
        decoded = {}
        for longest in (1, 2):
            wrong = 0
            for share in (1.0, 0.5, 0.1):
                used = [max(1, int(length * share)) for length in LENGTHS]
                places = [begin + length - 1 for begin, length in zip(begins, used, strict=True)]
                out = ops.decoding_attention(query[places], keys, values, table, used, scale, longest)
                wrong += unequal(out, expected[places])
            decoded[f"decoding, told of at most {longest}"] = wrong
        self._results.add(
            operator="attention",
            of=expected.numel(),
            head_width=width,
            unequal={"row by row": unequal(torch.cat(alone), expected), **decoded},
        )

    def _paged(self, tensor: Tensor, count: int) -> Tensor:
        cache = tensor.new_zeros(len(LENGTHS), count * PAGE, *tensor.shape[1:])
        for row, values in enumerate(tensor.split(LENGTHS)):
            cache[row, : len(values)] = values
        return cache.view(-1, PAGE, *tensor.shape[1:])

    def rope(self, queries: int, keys: int, width: int) -> None:
        cache = ops.rope_cache(4096, width, 1e6, "cuda", torch.bfloat16)
        positions = torch.arange(4096, device="cuda")
        arguments = (positions, self._normal(4096, queries), self._normal(4096, keys), width, cache)
        pairs = zip(ops.wide_rope(*arguments), ops.vllm_rope(*arguments), strict=True)
        self._results.add(operator="rope", of=4096 * (queries + keys), unequal=sum(unequal(*pair) for pair in pairs))

    def silu(self, intermediate: int) -> None:
        gate_up = self._normal(4096, 2 * intermediate) * 3
        expected = ops.vllm_silu(gate_up)
        self._results.add(operator="silu", of=expected.numel(), unequal=unequal(ops.torch_silu(gate_up), expected))

    def log_probs(self) -> None:
        logits = self._normal(1024, self._shape.vocabulary) * 3
        targets = torch.randint(0, self._shape.vocabulary, (1024,), device="cuda", generator=self._generator)
        expected = ops.vllm_log_probs(logits, targets, 1.0)
        few = unequal(ops.vllm_log_probs(logits[:3], targets[:3], 1.0), expected[:3])
        formula = apart(ops.formula_log_probs(logits, targets, 1.0), expected)
        self._results.add(operator="log-probs", varies=few, formula=formula)

    def _normal(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes, device="cuda", dtype=torch.bfloat16, generator=self._generator)


def _varying(product: Callable[[Tensor], Tensor], x: Tensor, expected: Tensor) -> int:
    """Elements that differ from the expected ones, over all numbers of rows."""
    counts: list[Any] = [*(rows for rows in ROWS if rows < len(x)), len(x)]
    return sum(unequal(product(x[:rows]), expected[:rows]) for rows in counts)
