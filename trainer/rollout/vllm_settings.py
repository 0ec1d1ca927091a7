"""What vLLM is told about a run's weights and its device."""

from trainer.config.tree import Config
from trainer.errors import ConfigError
from trainer.models.lora import target_names

CPU_KV_CACHE_GIB = 0.5
# The ranks that vLLM makes room for; a smaller adapter is filled up with zeros.
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


def weight_settings(config: Config, device: str) -> dict[str, object]:
    """Where the weights come from. Raises ConfigError for adapters that vLLM cannot compute with."""
    lora = config.actor.lora
    if not lora.rank:
        # The weights come from the actor. A weight that does not arrive stays random and is seen at once.
        settings: dict[str, object] = {"load_format": "dummy"}
        if device == "cpu":
            # A tied head is prepacked by itself and keeps its old weights on reload: give it weights of its own.
            settings["hf_overrides"] = {"tie_word_embeddings": False}
        return settings
    if device == "cuda" and config.model.dtype == "float32":
        raise ConfigError(
            "model.dtype=float32: on GPUs vLLM computes adapters in bfloat16 or float16 only",
            hint="set model.dtype=bfloat16, or rollout.engine=transformers",
        )
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(rank for rank in RANKS if rank >= lora.rank),
        # Only these: vLLM would make room beside the embeddings, too.
        "lora_target_modules": target_names(config.model.directory, lora),
    }


def device_settings(config: Config, device: str) -> dict[str, object]:
    """How much memory the engine may take, and what it must leave alone."""
    cache = config.rollout.kv_cache_gib
    if device == "cuda":
        share: dict[str, object] = {
            "gpu_memory_utilization": config.rollout.gpu_memory_utilization / config.rollout.engines_per_gpu
        }
        # With a fixed size nothing that starts on the GPU at the same time disturbs the measuring of free memory.
        return share if cache is None else {**share, "kv_cache_memory_bytes": int(cache * 2**30)}
    return {
        "kv_cache_memory_bytes": int((cache or CPU_KV_CACHE_GIB) * 2**30),
        # vLLM takes back the random numbers of half a prompt with an operation that CPU generators lack.
        "enable_chunked_prefill": False,
    }
