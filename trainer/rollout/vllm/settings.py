"""vLLM's environment variables, and its arguments for weights, memory, CUDA graphs and drafts.

Imports neither vLLM nor torch: vLLM reads its variables when it is imported, and torch some of them.
"""

import math
import os

from trainer.config.tree import Config
from trainer.errors import ConfigError

MULTIPROCESSING = "VLLM_ENABLE_V1_MULTIPROCESSING"
_ENVIRONMENT = {
    # The engine core runs in the process of its Ray actor: one process less to start, to feed and to supervise.
    MULTIPROCESSING: "0",
    # With `auto`, all engines of a machine are bound to its first core.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # vLLM's warnings are about choices that the trainer makes on purpose.
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
# An eager engine still compiles a helper for log-probs, which delays the first response by 3 s.
_EAGER = {"TORCHDYNAMO_DISABLE": "1"}
# For `actor.backend=exact`: batch-invariant operators, none of them compiled, because compiled operators round in other
# places.
EXACT = {"VLLM_BATCH_INVARIANT": "1", "TORCHDYNAMO_DISABLE": "1"}

CPU_KV_CACHE_GIB = 0.5
# Largest batch with a CUDA graph: vLLM's default, and here. Without a graph, a step launches its kernels one by one.
# vLLM supports at most 1,024, and larger batches were not faster.
DEFAULT_GRAPHS, GRAPHS = 512, 1024
# How models name the number of their experts.
_NUMBERS_OF_EXPERTS = {"num_experts", "num_local_experts", "n_routed_experts"}
# The adapter ranks that vLLM supports; a smaller adapter is padded with zeros.
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


def engine_environment(enforce_eager: bool) -> dict[str, str]:
    """The variables to set in the process of an engine. Values that the user set take precedence."""
    defaults = _ENVIRONMENT | (_EAGER if enforce_eager else {})
    return {name: os.environ.get(name, value) for name, value in defaults.items()}


def weight_settings(config: Config, device: str) -> dict[str, object]:
    """Arguments that say where weights come from, and in which type vLLM holds them.

    Raises ConfigError for adapters and types that vLLM does not support.
    """
    lora = config.actor.lora
    if config.rollout.quantization is not None:
        return _quantized(config, device)
    if not config.engines_apply_adapters:
        # The actor sends the weights. A missing weight stays random and shows at once.
        settings: dict[str, object] = {"load_format": "dummy"}
        if device == "cpu":
            # vLLM prepacks a tied head separately and does not update it on reload, so the head gets its own weights.
            settings["hf_overrides"] = {"tie_word_embeddings": False}
        return settings
    if device == "cuda" and config.model.dtype_on(device) == "float32":
        raise ConfigError(
            "model.dtype=float32: on GPUs vLLM computes adapters in bfloat16 or float16 only",
            hint="set model.dtype=bfloat16, or rollout.engine=transformers",
        )
    from trainer.models.lora import target_names

    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(rank for rank in RANKS if rank >= lora.rank),
        # Without this list vLLM also reserves memory for adapters of the embeddings.
        "lora_target_modules": target_names(config.model.directory, lora),
    }


def _quantized(config: Config, device: str) -> dict[str, object]:
    chosen = f"rollout.quantization={config.rollout.quantization}"
    if device == "cpu":
        raise ConfigError(f"{chosen}: vLLM quantises on GPUs only", hint="leave it out on CPU")
    if config.engines_apply_adapters:
        raise ConfigError(
            f"{chosen}: the frozen weights under adapters are not quantised",
            hint="leave it out, or rollout.lora=merged",
        )
    # A scale per weight; activations get one per token.
    return {"load_format": "dummy", "quantization": "fp8_per_tensor"}


def device_settings(config: Config, device: str) -> dict[str, object]:
    """Arguments for the engine's memory, and for features that the device lacks."""
    cache = config.rollout.kv_cache_gib
    if device == "cuda":
        share: dict[str, object] = {
            "gpu_memory_utilization": config.rollout.gpu_memory_utilization / config.rollout.engines_per_gpu
        }
        # A fixed size avoids measuring free memory while other processes start on the same GPU.
        return share if cache is None else {**share, "kv_cache_memory_bytes": int(cache * 2**30)}
    return {
        "kv_cache_memory_bytes": int((cache or CPU_KV_CACHE_GIB) * 2**30),
        # For a partial prompt vLLM rewinds the random generator, which CPU generators do not support.
        "enable_chunked_prefill": False,
    }


def expert_settings(config: Config, device: str) -> dict[str, object]:
    """Arguments that keep experts in the layout of the files, into which updates are copied: Triton's kernels, which
    vLLM prefers on Hopper. Others reorder the weights after loading."""
    if device == "cpu" or config.rollout.quantization is not None:
        return {}
    from trainer.models.files import read_json

    model = read_json(config.model.directory / "config.json")
    of_text = model.get("text_config")
    fields = model.keys() | (of_text.keys() if isinstance(of_text, dict) else set())
    return {"moe_backend": "triton"} if fields & _NUMBERS_OF_EXPERTS else {}


def graph_size(responses: int) -> int:
    """The smallest batch size of a CUDA graph of vLLM that holds this many responses."""
    multiple = 8 if responses < 256 else 16
    return math.ceil(responses / multiple) * multiple


def graph_settings(config: Config, device: str) -> dict[str, object]:
    """Arguments for CUDA graphs of all batch sizes of decode-only steps without drafts."""
    most = min(graph_size(config.rollout.max_num_seqs), GRAPHS)
    if device == "cpu" or config.rollout.eager_on(device) or most <= DEFAULT_GRAPHS:
        return {}
    return {"max_cudagraph_capture_size": most}


def draft_settings(max_drafted: int, device: str) -> dict[str, object]:
    """Arguments for at most `max_drafted` drafted tokens of a response in a step. None on GPUs: with
    `speculative_config` vLLM chooses its first model runner, which is slower."""
    if not max_drafted or device == "cuda":
        return {}
    proposer = "trainer.rollout.vllm.verification.NoDrafts"
    return {"speculative_config": {"method": "custom_class", "model": proposer, "num_speculative_tokens": max_drafted}}


def exact_settings(config: Config) -> dict[str, object]:
    """Arguments that turn Inductor off, which would replace the shared operators."""
    if not config.is_exact:
        return {}
    return {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "custom_ops": ["all"]}}
