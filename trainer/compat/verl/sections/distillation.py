"""Keys of verl's section `distillation`. They have an effect only with `distillation.enabled`."""

from trainer.compat.verl.rules import KL_KINDS, Given, Rule, Translation, Value, is_true, unsupported, word
from trainer.errors import ConfigError

_LOSS, _TEACHER = "distillation.distillation_loss", "distillation.teacher_models.teacher_model"


def _loss(given: Given, name: str, default: Value) -> Value:
    return given.get(f"{_LOSS}.{name}", default)


def teacher_alone(given: Given) -> bool:
    """Whether the policy learns from the teacher alone. verl then leaves out every other term of the loss."""
    return is_true(given.get("distillation.enabled", False)) and not is_true(_loss(given, "use_task_rewards", True))


def unless_teacher_alone(rule: Rule) -> Rule:
    """The rule of a term of the loss that a teacher replaces."""

    def replaced(key: str, value: Value, given: Given) -> Translation:
        if not teacher_alone(given):
            return rule(key, value, given)
        return Translation({}, f"{key} has no effect: {_LOSS}.use_task_rewards=false", ignored=True)

    return replaced


def enabled(key: str, value: Value, given: Given) -> Translation:
    """The teacher and the loss, with verl's defaults."""
    if not is_true(value):
        if word(value) != "false":
            raise unsupported(key, value, ("true", "false"))
        return Translation({})
    path, mode = given.get(f"{_TEACHER}.model_path"), word(_loss(given, "loss_mode", "k3"))
    if word(path) == "null":
        raise ConfigError(f"{key}=true needs one teacher", hint=f"set {_TEACHER}.model_path")
    if mode not in KL_KINDS:
        raise unsupported(f"{_LOSS}.loss_mode", mode, KL_KINDS)
    rewards = is_true(_loss(given, "use_task_rewards", True))
    settings: dict[str, Value] = {
        "distillation.teacher": path,
        "distillation.estimator": KL_KINDS[mode],
        "distillation.signal": "advantage" if is_true(_loss(given, "use_policy_gradient", False)) else "loss",
        "distillation.limit": _loss(given, "loss_max_clamp", None),
        "distillation.rewards": rewards,
    }
    if rewards:
        settings["distillation.coefficient"] = _loss(given, "distillation_loss_coef", 1.0)
    else:
        settings |= {"actor.entropy_coefficient": 0.0, "actor.kl_loss_coefficient": 0.0}
    return Translation(settings)


def read_with_enabled(_key: str, _value: Value, _given: Given) -> Translation:
    return Translation({})


def of_the_teacher_s_engine(key: str, _value: Value, _given: Given) -> Translation:
    note = f"{key} has no effect: the teacher is placed and sharded like the reference; see device_mapping.teacher"
    return Translation({}, note, ignored=True)


_ENGINE = (
    *("name", "dtype", "gpu_memory_utilization", "enforce_eager", "cudagraph_capture_sizes", "free_cache_engine"),
    *("data_parallel_size", "tensor_model_parallel_size", "max_num_batched_tokens", "max_model_len", "max_num_seqs"),
    *("load_format", "engine_kwargs", "engine_kwargs.*", "enable_chunked_prefill", "enable_prefix_caching"),
    *("disable_log_stats", "skip_tokenizer_init", "prompt_length", "response_length"),
)
RULES: dict[str, Rule] = {
    "distillation.enabled": enabled,
    **{
        f"{_LOSS}.{name}": read_with_enabled
        for name in ("loss_mode", "use_task_rewards", "distillation_loss_coef", "loss_max_clamp", "use_policy_gradient")
    },
    # Only losses on the teacher's most likely tokens use these two, and they are refused.
    f"{_LOSS}.topk": read_with_enabled,
    f"{_LOSS}.log_prob_min_clamp": read_with_enabled,
    f"{_TEACHER}.model_path": read_with_enabled,
    f"{_TEACHER}.key": read_with_enabled,
    "distillation.teacher_key": read_with_enabled,
    f"{_TEACHER}.num_replicas": of_the_teacher_s_engine,
    "distillation.n_gpus_per_node": of_the_teacher_s_engine,
    "distillation.nnodes": of_the_teacher_s_engine,
    **{f"{_TEACHER}.inference.{name}": of_the_teacher_s_engine for name in _ENGINE},
}
