"""Keys of verl's sections `reward_model` and `custom_reward_function`, and of `reward` in its later versions."""

from trainer.compat.verl.rules import (
    Given,
    Rule,
    Translation,
    Value,
    is_true,
    no_effect,
    no_effects,
    only,
    per_device,
    switched_by,
    to,
    typed,
    whole,
    word,
)
from trainer.compat.verl.shared import PROFILER_KEYS, SAMPLES, TRACES
from trainer.compat.verl.subsections.megatron import FROZEN
from trainer.compat.verl.subsections.sharding import FROZEN_DTYPE_KEYS, FSDP_KEYS
from trainer.errors import ConfigError

_REWARD_MODEL = "each device holds the whole reward model; reward.model.micro_batch_size limits its forward passes"


def has_function(given: Given) -> bool:
    """Whether a function of the user's scores."""
    sections = (*_FUNCTION_SECTIONS, "reward.custom_function")
    return any(word(given.get(f"{section}.path")) not in ("null", "none", "") for section in sections)


def model_scores(given: Given) -> bool:
    """Whether verl's reward model scores, alone."""
    return any(is_true(given.get(key)) for key in ("reward_model.enable", "reward.reward_model.enable"))


def penalises_length(given: Given) -> bool:
    """Whether long responses are penalised, by verl's keys or by ours."""
    buffers = [buffer for section in _OVERLONG_SECTIONS for buffer in _buffers(section)]
    enabled = manager_of(given) == "dapo" and any(is_true(given.get(f"{buffer}.enable")) for buffer in buffers)
    return enabled or bool(whole(given.get("reward.overlong_buffer")))


def reward_model_alone(key: str, value: Value, given: Given) -> Translation:
    """Where verl has a reward model, its score is the reward, unless a function of the user's asks the model."""
    if is_true(value) and has_function(given):
        raise ConfigError(
            f"{key}=true with custom_reward_function.path: a reward function cannot ask the reward model here",
            hint="serve the model and call it from the function, or leave one of the two out",
        )
    return Translation({"reward.weight": 0.0}) if is_true(value) else only("false", "null")(key, value, given)


def reward_model_input(_key: str, value: Value, _given: Given) -> Translation:
    """With a tokenizer named, verl decodes responses and applies the reward model's chat template."""
    return Translation({"reward.model.input": "tokens" if word(value) in ("null", "none") else "text"})


def manager_of(given: Given) -> str:
    """The reward manager that verl uses, by the latest of its keys."""
    names = [word(value) for key, value in given.items() if key in _MANAGER_KEYS and value is not None]
    return names[-1] if names else "naive"


def reward_manager(key: str, value: Value, given: Given) -> Translation:
    """The managers that differ only in how they run the same function give the same rewards. The batch manager calls
    the user's function once for all responses."""
    if word(value) == "batch" and has_function(given):
        return Translation({"reward.custom_function.batched": True})
    if word(value) == "batch":
        raise ConfigError(
            f"{key}=batch needs a reward function for whole batches",
            hint="set custom_reward_function.path, or leave the manager out: rules then score by data_source",
        )
    if word(value) == "gdpo" and has_function(given):
        return Translation(
            {},
            f"{key}=gdpo: the function's extra_info has no experiment_name; give it as "
            "custom_reward_function.reward_kwargs.NAME=VALUE",
        )
    return only(*_SAME_REWARDS)(key, value, given)


def function_path(_key: str, value: Value, given: Given) -> Translation:
    """verl waits for the function however long it takes. If it raises, the run ends; with the manager prime, the
    response scores 0. Environments and tools are not meant: see `agents`."""
    inherited: dict[str, Value] = {}
    if has_function(given):
        failures: dict[str, Value] = {"reward.max_failed_share": 0.0}
        if manager_of(given) == "prime":
            failures = {"reward.max_failed_share": 1.0, "reward.failure_score": 0.0}
        ours = "reward.failure_score" in given or "rollout.max_failed_share" in given
        inherited = {"reward.timeout": 3600, **({} if ours else failures)}
    return Translation({"reward.custom_function.path": value}, inherited=inherited)


def function_name(section: str) -> Rule:
    """verl's default files name a function without its file."""

    def rule(key: str, value: Value, given: Given) -> Translation:
        if has_function(given):
            return Translation({"reward.custom_function.name": value})
        default = word(value) in ("compute_score", "null")
        return Translation({}, "" if default else f"{key} has no effect: {section}.path is not given")

    return rule


def function_kwargs(section: str) -> Rule:
    """Keyword arguments of the user's function, from all keys of a section."""

    def rule(_key: str, _value: Value, given: Given) -> Translation:
        whole_section = given.get(section)
        kwargs = dict(whole_section) if isinstance(whole_section, dict) else {}
        direct = {
            name.removeprefix(f"{section}."): typed(text)
            for name, text in given.items()
            if name.startswith(f"{section}.")
        }
        return Translation({"reward.custom_function.kwargs": kwargs | direct})

    return rule


def manager_kwargs(section: str) -> Rule:
    """Arguments of a manager: the batch manager hands them to the function, the others have none besides DAPO's."""

    def rule(key: str, value: Value, given: Given) -> Translation:
        if manager_of(given) == "batch":
            return function_kwargs(section)(key, value, given)
        if word(value) in ("null", "{}"):
            return Translation({})
        raise ConfigError(
            f"{key}: the reward manager {manager_of(given)} has no such argument",
            hint="give arguments of your own function as custom_reward_function.reward_kwargs.NAME=VALUE",
        )

    return rule


def overlong_rules(section: str) -> dict[str, Rule]:
    """DAPO's penalty for long responses, which verl reads from either of two sections. It is off unless `enable` is
    true and the manager is dapo."""
    rules: dict[str, Rule] = {f"{section}.max_resp_len": longest_response(section)}
    for buffer in _buffers(section):
        rules |= {
            f"{buffer}.enable": overlong_switch(buffer),
            f"{buffer}.len": overlong(buffer, "reward.overlong_buffer"),
            f"{buffer}.penalty_factor": overlong(buffer, "reward.overlong_penalty"),
            f"{buffer}.log": no_effect("response lengths are always logged"),
        }
    return rules


def overlong_switch(buffer: str) -> Rule:
    def rule(key: str, value: Value, given: Given) -> Translation:
        if not is_true(value):
            return only("false", "null")(key, value, given)
        if manager_of(given) != "dapo":
            return no_effect(_DAPO_ALONE)(key, value, given)
        if (whole(given.get(f"{buffer}.len")) or 0) <= 0:
            raise ConfigError(f"{key}={value} needs a buffer", hint=f"set {buffer}.len to a number of tokens above 0")
        return Translation({})

    return rule


def overlong(buffer: str, ours: str) -> Rule:
    def rule(key: str, value: Value, given: Given) -> Translation:
        if manager_of(given) != "dapo":
            return no_effect(_DAPO_ALONE)(key, value, given)
        return switched_by(f"{buffer}.enable", ours)(key, value, given)

    return rule


def longest_response(section: str) -> Rule:
    """verl measures the penalty from this length, we from data.max_response_length."""

    def rule(key: str, value: Value, given: Given) -> Translation:
        longest = given.get("data.max_response_length")
        penalised = manager_of(given) == "dapo" and any(is_true(given.get(f"{b}.enable")) for b in _buffers(section))
        if penalised and longest is not None and word(longest) != word(value):
            raise ConfigError(
                f"{key}={value} differs from data.max_response_length={longest}",
                hint="the penalty is measured from data.max_response_length: set both to the same number",
            )
        return Translation({})

    return rule


def sandbox_url(key: str, value: Value, given: Given) -> Translation:
    """verl gives a test 10 seconds there, and hands the server to its own rules only."""
    if word(value) in ("null", "none", ""):
        return Translation({})
    if has_function(given):
        return Translation({}, f"{key} has no effect: custom_reward_function.path scores")
    return Translation({"reward.code_sandbox_url": value}, inherited={"reward.code_seconds": 10.0})


def _buffers(section: str) -> tuple[str, str]:
    return f"{section}.overlong_buffer", f"{section}.overlong_buffer_cfg"


_DAPO_ALONE = "only the reward manager dapo reads it"
_MANAGER_KEYS = ("reward_model.reward_manager", "reward.reward_manager.name")
_SAME_REWARDS = ("naive", "dapo", "gdpo", "prime", "remote", "null")
_OVERLONG_SECTIONS = ("reward_model", "reward_model.reward_kwargs", "reward.reward_kwargs")
_FUNCTION_SECTIONS = ("custom_reward_function", "reward.custom_reward_function")

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


def function_rules(section: str) -> dict[str, Rule]:
    """The user's own reward function."""
    return {
        f"{section}.path": function_path,
        f"{section}.name": function_name(section),
        f"{section}.reward_kwargs": function_kwargs(f"{section}.reward_kwargs"),
        f"{section}.reward_kwargs.*": function_kwargs(f"{section}.reward_kwargs"),
    }


def sandbox_rules(section: str) -> dict[str, Rule]:
    """The service that runs programs for verl."""
    return {
        f"{section}.url": sandbox_url,
        f"{section}.max_concurrent": no_effect("reward.processes responses per node are scored at once"),
        f"{section}.memory_limit_mb": to("reward.code_memory_mb"),
    }


RULES: dict[str, Rule] = {
    **function_rules("custom_reward_function"),
    "reward_model.enable": reward_model_alone,
    "reward_model.model.path": switched_by("reward_model.enable", "reward.model.path"),
    "reward_model.model.input_tokenizer": reward_model_input,
    "reward_model.micro_batch_size_per_gpu": to("reward.model.micro_batch_size"),
    "reward_model.max_length": to("reward.model.max_length"),
    "reward_model.micro_batch_size": per_device("reward.model.micro_batch_size"),
    "reward_model.reward_manager": reward_manager,
    **{key: rule for section in _OVERLONG_SECTIONS for key, rule in overlong_rules(section).items()},
    **reward_engine_rules("reward_model.rollout"),
    **reward_engine_rules("reward.reward_model.rollout"),
    "reward_model.reward_kwargs": manager_kwargs("reward_model.reward_kwargs"),
    "reward_model.reward_kwargs.num_examine": no_effect(SAMPLES),
    "reward_model.reward_kwargs.*": manager_kwargs("reward_model.reward_kwargs"),
    **no_effects(
        "reward_model",
        ("launch_reward_fn_async", "use_reward_loop", "num_workers"),
        "rewards are computed in separate processes, reward.processes of them per node",
    ),
    **no_effects("reward_model", _REWARD_MODEL_KEYS, _REWARD_MODEL),
    **no_effects("reward_model.model.fsdp_config", ("param_offload", *FSDP_KEYS, *FROZEN_DTYPE_KEYS), _REWARD_MODEL),
    **no_effects(
        "reward_model.megatron",
        (
            "param_offload",
            "override_transformer_config",
            "override_transformer_config.*",
            *FROZEN,
            "use_dist_checkpointing",
            "dtype",
        ),
        _REWARD_MODEL,
    ),
    **no_effects("reward_model.profiler", ("enable", *PROFILER_KEYS), TRACES),
    **sandbox_rules("reward_model.sandbox_fusion"),
    # verl 0.7 and later
    **function_rules("reward.custom_reward_function"),
    "reward.reward_manager.name": reward_manager,
    "reward.reward_manager.source": only("register", "null"),
    "reward.reward_manager.module.path": only("null"),
    "reward.reward_kwargs": manager_kwargs("reward.reward_kwargs"),
    "reward.reward_kwargs.num_examine": no_effect(SAMPLES),
    "reward.reward_kwargs.*": manager_kwargs("reward.reward_kwargs"),
    "reward.num_workers": no_effect("rewards are computed in reward.processes processes per node"),
    "reward.reward_model.enable": reward_model_alone,
    "reward.reward_model.model_path": switched_by("reward.reward_model.enable", "reward.model.path"),
    **no_effects("reward.reward_model", ("enable_resource_pool", "n_gpus_per_node", "nnodes"), _REWARD_MODEL),
    **sandbox_rules("reward.sandbox_fusion"),
    **sandbox_rules("sandbox_fusion"),
}
