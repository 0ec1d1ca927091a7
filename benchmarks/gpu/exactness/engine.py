"""An engine in batch-invariant mode beside the forward pass from shared operators, and what the mode costs."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.common import SHAPES, Results, synchronize, timed
from benchmarks.gpu.exactness import operators as ops
from benchmarks.gpu.exactness import trace
from benchmarks.gpu.exactness.comparing import apart, reported
from benchmarks.gpu.exactness.forward import FORMULAS, Model, Operators, log_probs, shared
from benchmarks.gpu.exactness.sampling import Sampled, Work, drawn_tokens, sample, workloads

# Products of the engine by its name. `stock` is vLLM's batch-invariant mode as it is, `today` how the trainer runs it.
SHARING = {"tiles": ops.tiled_product, "cublas": ops.torch_product}
ENGINES = (*SHARING, "stock", "today")
LENGTH = 1024
# Sizes of graphs of decoding steps.
GRAPHS = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512]
LINE_TOKENS = 16384


def measure(name: str, shape: str, model: Path, device: str, results: Results) -> None:
    """Compares an engine with shared operators, and times any."""
    vocabulary, small = SHAPES[shape].vocabulary, device == "cpu"
    if name in SHARING and not small:
        share_operators(SHARING[name])
    engine = opened(name, model, small)
    if name in SHARING:
        compare(FORMULAS if small else shared(SHARING[name]), engine, shape, model, device, results)
    speed(engine, vocabulary, small, results)


def share_operators(product: Any) -> None:
    """Replaces what varies with the number of rows, and the products, before an engine is built."""
    import vllm.model_executor.layers.layernorm as norms
    import vllm.model_executor.layers.linear as products
    import vllm.model_executor.layers.vocab_parallel_embedding as heads
    import vllm.v1.attention.backends.flash_attn as attention

    def norm(x: Tensor, weight: Tensor, eps: float = 1e-6, residual: Tensor | None = None) -> Any:
        return ops.own_norm(x, weight, eps, residual)

    norms.rms_norm_batch_invariant = norm
    products.linear_batch_invariant = product
    heads.linear_batch_invariant = product
    attention.flash_attn_varlen_func = told_of_two(attention.flash_attn_varlen_func)
    attention.get_scheduler_metadata = told_of_two(attention.get_scheduler_metadata)


def told_of_two(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decoding step takes the tiles of a prefill: `decoding_attention` says why."""

    def call(*arguments: Any, **named: Any) -> Any:
        if "max_seqlen_q" in named:
            named["max_seqlen_q"] = max(2, named["max_seqlen_q"])
        return function(*arguments, **named)

    return call


def opened(name: str, model: Path, small: bool) -> Any:
    from vllm import LLM

    if small:
        device: dict[str, Any] = {
            "dtype": "float32",
            "enforce_eager": True,
            "enable_chunked_prefill": False,
            "kv_cache_memory_bytes": 2**29,
            "max_num_seqs": 16,
        }
    else:
        device = {
            "dtype": "bfloat16",
            "gpu_memory_utilization": 0.4,
            "kv_cache_memory_bytes": 12 * 2**30,
            "max_num_seqs": 512,
            "max_num_batched_tokens": 8192,
        }
        if name != "today":
            # Without Inductor, which would replace the operators.
            device["compilation_config"] = {
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "custom_ops": ["all"],
                "cudagraph_capture_sizes": GRAPHS,
            }
    return LLM(
        str(model),
        skip_tokenizer_init=True,
        max_model_len=LENGTH,
        logprobs_mode="processed_logprobs",
        enable_prefix_caching=True,
        disable_log_stats=True,
        **device,
    )


def compare(chosen: Operators, engine: Any, shape: str, directory: Path, device: str, results: Results) -> None:
    from transformers import AutoModelForCausalLM

    vocabulary = SHAPES[shape].vocabulary
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    language_model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, local_files_only=True).to(device)
    model = Model.of(language_model)
    cache = ops.rope_cache(LENGTH, model.width, model.base, device, dtype)
    for work in workloads(vocabulary, device == "cpu"):
        with reported(results, work.name):
            sampled, _ = sample(engine, work)
            results.add(work=work.name, responses=len(work.prompts), **compared(model, chosen, sampled, cache, device))
    with reported(results, "trace"):
        trace.compare(engine, model, chosen, cache, vocabulary, device, results)


def compared(model: Model, chosen: Operators, sampled: Sampled, cache: Tensor, device: str) -> dict[str, Any]:
    found: list[Tensor] = []

    def passes() -> None:
        found.clear()
        found.extend(log_probs(model, chosen, line, cache, sampled.temperature) for line in lines)
        synchronize()

    lines = sampled.lines(device, LINE_TOKENS)
    passes()  # compiles kernels
    taken = timed(passes)
    return {"seconds_of_passes": round(taken, 3), **apart(torch.cat(found).cpu(), sampled.log_probs)}


def speed(engine: Any, vocabulary: int, small: bool, results: Results) -> None:
    """Tokens per second with a seed and a log-prob for each request."""
    draw = random.Random(2)
    length = 8 if small else 256
    sample(engine, Work("warm-up", [drawn_tokens(draw, vocabulary, 128) for _ in range(8)], [4] * 8))
    for prompts, samples in [(4, 2)] if small else [(64, 8), (8, 8), (1, 8)]:
        drawn = [drawn_tokens(draw, vocabulary, 128) for _ in range(prompts)]
        work = Work("speed", [prompt for prompt in drawn for _ in range(samples)], [length] * prompts * samples)
        _, seconds = sample(engine, work)
        results.add(
            responses=prompts * samples,
            tokens_per_second=round(length * prompts * samples / seconds),
            milliseconds_per_token=round(1000 * seconds / length, 3),
        )
