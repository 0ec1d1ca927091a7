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
    switched_by,
    to,
    word,
)
from trainer.compat.verl.sharding import FSDP_KEYS, MEGATRON_KEYS
from trainer.compat.verl.shared import PROFILER_KEYS, TRACES

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
    "reward_model.reward_kwargs": no_effect("a rule takes its parameters from settings under reward"),
    "reward_model.reward_kwargs.*": no_effect("a rule takes its parameters from settings under reward"),
}
