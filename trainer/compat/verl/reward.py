"""Keys of verl's sections `reward_model` and `custom_reward_function`."""

from trainer.compat.verl.rules import (
    Given,
    Rule,
    Translation,
    Value,
    is_true,
    mapped,
    no_effect,
    no_effects,
    only,
    refused,
    switched_by,
    to,
    word,
)
from trainer.compat.verl.sharding import FSDP_KEYS, MEGATRON_KEYS
from trainer.compat.verl.shared import PROFILER_KEYS, SAMPLES, TRACES

_REWARD_MODEL = "each device holds the whole reward model; reward.model.micro_batch_size limits its forward passes"


def reward_model_alone(key: str, value: Value, given: Given) -> Translation:
    """Where verl has a reward model, its score is the reward."""
    return Translation({"reward.weight": 0.0}) if is_true(value) else only("false")(key, value, given)


def reward_model_input(_key: str, value: Value, _given: Given) -> Translation:
    """With a tokenizer named, verl decodes responses and applies the reward model's chat template."""
    return Translation({"reward.model.input": "tokens" if word(value) in ("null", "none") else "text"})


def overlong_rules(section: str) -> dict[str, Rule]:
    """DAPO's penalty for long responses, which verl reads from either of two sections."""
    rules: dict[str, Rule] = {f"{section}.max_resp_len": no_effect("see data.max_response_length")}
    for buffer in (f"{section}.overlong_buffer", f"{section}.overlong_buffer_cfg"):
        rules |= {
            f"{buffer}.enable": only("true", "false"),
            f"{buffer}.len": to("reward.overlong_buffer"),
            f"{buffer}.penalty_factor": to("reward.overlong_penalty"),
            f"{buffer}.log": no_effect("response lengths are always logged"),
        }
    return rules


_REWARD_MODEL_KEYS = (
    *("strategy", "use_dynamic_bsz", "forward_max_token_len_per_gpu", "ulysses_sequence_parallel_size"),
    *("enable_resource_pool", "n_gpus_per_node", "nnodes", "nccl_timeout", "model.external_lib"),
    *("model.trust_remote_code", "model.use_shm", "model.use_remove_padding", "model.use_fused_kernels"),
    *("model.override_config", "model.override_config.*", "load_weight"),
)


def reward_engine_rules(section: str) -> dict[str, Rule]:
    """verl's engine of the reward model. Here the reward model computes its scores itself."""
    names = (
        *("name", "dtype", "gpu_memory_utilization", "enforce_eager", "cudagraph_capture_sizes", "free_cache_engine"),
        *("data_parallel_size", "tensor_model_parallel_size", "max_num_batched_tokens", "max_model_len", "load_format"),
        *("max_num_seqs", "enable_chunked_prefill", "enable_prefix_caching", "disable_log_stats", "prompt_length"),
        *("response_length", "skip_tokenizer_init"),
    )
    return no_effects(section, names, _REWARD_MODEL)


RULES: dict[str, Rule] = {
    "custom_reward_function.path": to("reward.custom_function.path"),
    "custom_reward_function.name": to("reward.custom_function.name"),
    "reward_model.enable": reward_model_alone,
    "reward_model.model.path": switched_by("reward_model.enable", "reward.model.path"),
    "reward_model.model.input_tokenizer": reward_model_input,
    "reward_model.micro_batch_size_per_gpu": to("reward.model.micro_batch_size"),
    "reward_model.max_length": to("reward.model.max_length"),
    "reward_model.micro_batch_size": only("null"),
    "reward_model.reward_manager": mapped({"naive": "gsm8k", "dapo": "gsm8k", "batch": "gsm8k"}, "reward.name"),
    **overlong_rules("reward_model"),
    **overlong_rules("reward_model.reward_kwargs"),
    **overlong_rules("reward.reward_kwargs"),
    **reward_engine_rules("reward_model.rollout"),
    **reward_engine_rules("reward.reward_model.rollout"),
    "reward_model.launch_reward_fn_async": no_effect("rewards are computed in separate processes"),
    **no_effects("reward_model", _REWARD_MODEL_KEYS, _REWARD_MODEL),
    **no_effects("reward_model.model.fsdp_config", ("param_offload", *FSDP_KEYS), _REWARD_MODEL),
    **no_effects("reward_model.megatron", ("param_offload", *MEGATRON_KEYS), _REWARD_MODEL),
    **no_effects(
        "reward_model.sandbox_fusion",
        ("url", "max_concurrent", "memory_limit_mb"),
        "reward.custom_function can call a sandbox",
    ),
    **no_effects("reward_model.profiler", ("enable", *PROFILER_KEYS), TRACES),
    "reward_model.reward_kwargs": only("{}", "null"),
    "reward.reward_kwargs": only("{}", "null"),
    "reward.custom_reward_function.path": to("reward.custom_function.path"),
    "reward.custom_reward_function.name": to("reward.custom_function.name"),
    "reward.reward_model.enable": reward_model_alone,
    "reward.reward_model.model_path": switched_by("reward.reward_model.enable", "reward.model.path"),
    **no_effects("reward.reward_model", ("enable_resource_pool", "n_gpus_per_node", "nnodes"), _REWARD_MODEL),
    "reward_model.reward_kwargs.*": refused("settings under reward are the parameters of a rule"),
    "reward.reward_kwargs.*": refused("settings under reward are the parameters of a rule"),
    "reward_model.reward_kwargs.num_examine": no_effect(SAMPLES),
    "reward.reward_kwargs.num_examine": no_effect(SAMPLES),
    "reward_model.num_workers": no_effect("see reward.processes"),
    "reward.num_workers": no_effect("see reward.processes"),
    "reward_model.use_reward_loop": no_effect("rewards are computed in separate processes"),
}
