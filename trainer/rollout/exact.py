"""Gives vLLM the operators that the trainer's layers compute with, for `actor.backend=exact`."""

from collections.abc import Callable
from typing import Any

from torch import Tensor


def share_operators() -> None:
    """Replaces, in vLLM's batch-invariant mode, the operators that are not the trainer's. Call it before an engine
    is built."""
    import vllm.model_executor.layers.layernorm as norms
    import vllm.model_executor.layers.linear as products
    import vllm.model_executor.layers.vocab_parallel_embedding as heads
    import vllm.v1.attention.backends.flash_attn as attention

    from trainer.models.exact import kernels

    def norm(x: Tensor, weight: Tensor, eps: float = 1e-6, residual: Tensor | None = None) -> Any:
        return kernels.norm(x, weight, eps, residual)

    norms.rms_norm_batch_invariant = norm
    products.linear_batch_invariant = kernels.product
    heads.linear_batch_invariant = kernels.product
    attention.flash_attn_varlen_func = _told_of_two(attention.flash_attn_varlen_func)
    attention.get_scheduler_metadata = _told_of_two(attention.get_scheduler_metadata)


def _told_of_two(function: Callable[..., Any]) -> Callable[..., Any]:
    """Told that the longest row has one query, FlashAttention drops the causal mask, and then takes other tiles for
    some widths of heads. Told of two, it computes a decoding step as a prefill."""

    def call(*arguments: Any, **named: Any) -> Any:
        if "max_seqlen_q" in named:
            named["max_seqlen_q"] = max(2, named["max_seqlen_q"])
        return function(*arguments, **named)

    return call
