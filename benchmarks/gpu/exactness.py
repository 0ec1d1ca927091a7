"""Which operators give a row the same bits beside any others: those of `trainer.models.exact`, vLLM's and torch's.

    python -m benchmarks.gpu.exactness --shape 1.5B --out FILE

Needs a GPU and vLLM's batch-invariant mode (VLLM_BATCH_INVARIANT=1, set here). `unequal` counts elements whose bits
differ, over all numbers of rows that were tried. Whole log-probs are compared by each run with `actor.backend=exact`.
"""

import itertools
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.common import SHAPES, Results, Shape, arguments
from trainer.models.exact.operators import FORMULAS, rope_table
from trainer.rollout.process_environment import EXACT

ROWS = (1, 2, 3, 8, 13, 16, 17, 33, 64, 65, 96, 128, 129, 200, 255, 256, 257, 500, 512, 1024, 1500)
TIMED_ROWS = (8, 64, 256, 512)
LENGTHS = [100, 1, 17, 600, 128, 129, 333, 255, 512, 900]
PAGE = 16
CALLS = 20  # in a graph, each with a weight of its own, so that none is in the cache


class Census:
    """Each method compares the variants of one operator on random numbers and adds a row."""

    def __init__(self, shape: Shape, results: Results) -> None:
        from trainer.models.exact import kernels

        self._kernels, self._shape, self._results = kernels, shape, results
        self._generator = torch.Generator("cuda").manual_seed(0)

    def take(self) -> None:
        width = self._shape.hidden // self._shape.heads
        queries, keys = self._shape.heads * width, self._shape.key_value_heads * width
        hidden, intermediate = self._shape.hidden, self._shape.intermediate
        self.product("qkv_proj", hidden, queries + 2 * keys, bias=True)
        self.product("o_proj", queries, hidden)
        self.product("gate_up_proj", hidden, 2 * intermediate)
        self.product("down_proj", intermediate, hidden)
        self.product("head", hidden, self._shape.vocabulary)
        self.norm(hidden)
        self.attention(self._shape.heads, self._shape.key_value_heads, width)
        self.rope(queries, keys, width)
        self.silu(intermediate)
        self.log_probs()

    def product(self, name: str, inner: int, outer: int, bias: bool = False) -> None:
        shared_product, many = self._kernels.product, 2048 if outer > 100_000 else 8192
        x, weight = self._normal(many, inner), self._normal(outer, inner) * 0.02
        offset = self._normal(outer) if bias else None
        expected = shared_product(x, weight, offset)
        differences = {"cuBLAS": _varying(lambda part: functional.linear(part, weight, offset), x, expected)}
        for tile in (*self._kernels.TILES, *self._kernels.TILES_FOR_FEW):
            product = partial(shared_product, weight=weight, bias=offset, tile=tile)
            differences["x".join(map(str, tile[:3]))] = _varying(product, x, expected)
        self._results.add(
            operator=name, of=expected.numel(), unequal=differences, microseconds=self._times(inner, outer)
        )

    def _times(self, inner: int, outer: int) -> dict[str, dict[str, float]]:
        weights = [self._normal(outer, inner) for _ in range(CALLS if outer < 100_000 else 2)]
        microseconds = {}
        for rows in TIMED_ROWS:
            x = self._normal(rows, inner)
            microseconds[str(rows)] = {
                "shared": _microseconds(self._kernels.product, x, weights),
                "cuBLAS": _microseconds(functional.linear, x, weights),
            }
        return microseconds

    def norm(self, width: int) -> None:
        from vllm.model_executor.layers.batch_invariant import rms_norm_batch_invariant

        def vllm_norm(x: Tensor, weight: Tensor, epsilon: float, residual: Tensor) -> Any:
            """It works in place."""
            return rms_norm_batch_invariant(x.clone(), weight, epsilon, residual=residual.clone())

        x, residual, weight = self._normal(2048, width), self._normal(2048, width) * 3, self._normal(width)
        shared_norm, differences = self._kernels.norm, {}
        for name, norm in {"shared": shared_norm, "vLLM's": vllm_norm}.items():
            whole = norm(x, weight, 1e-6, residual)[0]
            differences[name] = {
                rows: bad
                for rows in ROWS
                if (bad := unequal(norm(x[:rows], weight, 1e-6, residual[:rows])[0], whole[:rows]))
            }
        fused, total = shared_norm(x, weight, 1e-6, residual)
        differences["shared, of the sum"] = unequal(shared_norm(total, weight, 1e-6), fused)
        self._results.add(operator="norm", of=x.numel(), unequal=differences)

    def attention(self, heads: int, groups: int, width: int) -> None:
        scale = width**-0.5
        query, key, value = (self._normal(sum(LENGTHS), count, width) for count in (heads, groups, groups))
        expected = self._kernels.attention(query, key, value, scale, **_bounds(LENGTHS))
        rows = zip(query.split(LENGTHS), key.split(LENGTHS), value.split(LENGTHS), strict=True)
        alone = [self._kernels.attention(q, k, v, scale, **_bounds([len(q)])) for q, k, v in rows]
        # Every row's cache in pages of its own; its last token, one in the middle and an early one are decoded.
        count = -(-max(LENGTHS) // PAGE)
        table = torch.arange(len(LENGTHS) * count, dtype=torch.int32, device="cuda").view(-1, count)
        keys, values = (_paged(tensor, count) for tensor in (key, value))
        begins = [sum(LENGTHS[:row]) for row in range(len(LENGTHS))]
        differences = {"row by row": unequal(torch.cat(alone), expected)}
        for longest, share in itertools.product((1, 2), (1.0, 0.5, 0.1)):
            used = [max(1, int(length * share)) for length in LENGTHS]
            places = [begin + length - 1 for begin, length in zip(begins, used, strict=True)]
            out = decoding_attention(query[places], keys, values, table, used, scale, longest)
            name = f"decoding, told of at most {longest}"
            differences[name] = differences.get(name, 0) + unequal(out, expected[places])
        self._results.add(operator="attention", of=expected.numel(), head_width=width, unequal=differences)

    def rope(self, queries: int, keys: int, width: int) -> None:
        table = rope_table(4096, width, 1e6, torch.device("cuda"), torch.bfloat16)
        given = (torch.arange(4096, device="cuda"), self._normal(4096, queries), self._normal(4096, keys), width, table)
        formula = sum(map(unequal, FORMULAS.rope(*given), self._kernels.rope(*given)))
        self._results.add(operator="rope", of=4096 * (queries + keys), unequal={"formula": formula})

    def silu(self, intermediate: int) -> None:
        gate_up = self._normal(4096, 2 * intermediate) * 3
        gate, up = gate_up.chunk(2, dim=-1)
        expected = torch.empty_like(gate, memory_format=torch.contiguous_format)
        torch.ops._C.silu_and_mul(expected, gate_up)
        differences = {"torch": unequal(functional.silu(gate) * up, expected)}
        self._results.add(operator="silu", of=expected.numel(), unequal=differences)

    def log_probs(self) -> None:
        vocabulary = self._shape.vocabulary
        logits = self._normal(1024, vocabulary) * 3
        ids = torch.randint(0, vocabulary, (1024,), device="cuda", generator=self._generator)
        expected = self._kernels.log_probs(logits, ids, 1.0)
        differences = {
            "few rows": unequal(self._kernels.log_probs(logits[:3], ids[:3], 1.0), expected[:3]),
            "formula": unequal(FORMULAS.log_probs(logits, ids, 1.0), expected),
        }
        self._results.add(operator="log-probs", of=len(ids), unequal=differences)

    def _normal(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes, device="cuda", dtype=torch.bfloat16, generator=self._generator)


def decoding_attention(
    query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: list[int], scale: float, longest_query: int
) -> Tensor:
    """The kernel as a decoding step calls it: one query a row, keys and values [pages, page size, heads, width]."""
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    return flash_attn_varlen_func(
        *(query, keys, values),
        max_seqlen_q=longest_query,
        cu_seqlens_q=torch.arange(len(lengths) + 1, dtype=torch.int32, device=query.device),
        max_seqlen_k=max(lengths),
        seqused_k=torch.tensor(lengths, dtype=torch.int32, device=query.device),
        block_table=table,
        softmax_scale=scale,
        causal=True,
        window_size=[-1, -1],
        num_splits=1,
        fa_version=3,
    )


def _bounds(lengths: list[int]) -> dict[str, Any]:
    offsets = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    longest = max(lengths)
    return {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": longest, "max_length_k": longest}


def _paged(tensor: Tensor, count: int) -> Tensor:
    cache = tensor.new_zeros(len(LENGTHS), count * PAGE, *tensor.shape[1:])
    for row, values in enumerate(tensor.split(LENGTHS)):
        cache[row, : len(values)] = values
    return cache.view(-1, PAGE, *tensor.shape[1:])


def unequal(computed: Tensor, expected: Tensor) -> int:
    """Number of elements whose bits differ."""
    kind = {2: torch.int16, 4: torch.int32}[computed.element_size()]
    return int((computed.contiguous().view(kind) != expected.contiguous().view(kind)).sum())


def _varying(product: Callable[[Tensor], Tensor], x: Tensor, expected: Tensor) -> int:
    """Elements that differ from the expected ones, over all numbers of rows."""
    counts = [*(rows for rows in ROWS if rows < len(x)), len(x)]
    return sum(unequal(product(x[:rows]), expected[:rows]) for rows in counts)


def _microseconds(product: Callable[[Tensor, Tensor], Tensor], x: Tensor, weights: list[Tensor]) -> float:
    """GPU time of one product, in a graph of many, as engines decode."""
    product(x, weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in itertools.islice(itertools.cycle(weights), CALLS):
            product(x, weight)
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return round(1000 * begin.elapsed_time(end) / CALLS, 1)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--shape", choices=SHAPES, default="1.5B")
    options = parser.parse_args()
    os.environ.update(EXACT)
    Census(SHAPES[options.shape], Results(options.out, "exactness")).take()


if __name__ == "__main__":
    main()
