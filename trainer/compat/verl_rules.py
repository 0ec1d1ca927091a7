"""Rules that turn a setting of verl into ours. `trainer/compat/verl_keys.py` assigns one to each key."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from trainer.algorithms.registry import CORRECTIONS
from trainer.compat.verl_sections import FSDP_KEYS, MEGATRON_KEYS, RECOMPUTE_KEYS
from trainer.errors import ConfigError

Value = str | int | float | bool | list["Value"] | dict[str, "Value"] | None
"""A value as YAML reads it. Scalars of the command line are text until a setting's type reads them."""

Given = Mapping[str, Value]

KL_KINDS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


@dataclass(frozen=True)
class Translation:
    """Our settings for one of verl's, and a note for the user where behaviour differs.

    verl copies some values from one role to another. A role's own setting overrides such an `inherited` one.
    """

    settings: dict[str, Value]
    note: str = ""
    inherited: dict[str, Value] = field(default_factory=dict)


Rule = Callable[[str, Value, Given], Translation]
"""Takes a key, its value, and all settings given, the latest last."""


def word(value: Value) -> str:
    """A scalar in lower case as YAML spells it: `true`, `null`, `1`."""
    return "null" if value is None else str(value).lower()


def whole(value: Value) -> int | None:
    """A whole number; None for anything else."""
    text = word(value)
    return int(text) if text.removeprefix("-").isdecimal() else None


def is_true(value: Value) -> bool:
    return word(value) == "true"


def to(*ours: str, inherited: Sequence[str] = ()) -> Rule:
    """The same value under our keys."""
    return lambda _key, value, _given: Translation(
        dict.fromkeys(ours, value), inherited=dict.fromkeys(inherited, value)
    )


def mapped(values: Mapping[str, str], ours: str, inherited: Sequence[str] = ()) -> Rule:
    """Our setting, with our word for each value. Other values are refused."""

    def rule(key: str, value: Value, _given: Given) -> Translation:
        if word(value) not in values:
            raise _unsupported(key, value, values)
        ours_word = values[word(value)]
        return Translation({ours: ours_word}, inherited=dict.fromkeys(inherited, ours_word))

    return rule


def only(*accepted: str) -> Rule:
    """No setting of ours: the accepted values describe fixed behaviour. Other values are refused."""

    def rule(key: str, value: Value, _given: Given) -> Translation:
        if word(value) not in accepted:
            raise _unsupported(key, value, accepted)
        return Translation({})

    return rule


def no_effect(reason: str) -> Rule:
    """The key is accepted and ignored; the note gives the reason."""
    return lambda key, _value, _given: Translation({}, f"{key} has no effect: {reason}")


def no_effects(section: str, names: Iterable[str], reason: str) -> dict[str, Rule]:
    """`no_effect` for several keys of a section."""
    return {f"{section}.{name}": no_effect(reason) for name in names}


def to_responses(ours: str, inherited: Sequence[str] = ()) -> Rule:
    """Converts a mini-batch size: verl counts prompts, we count responses."""

    def rule(key: str, value: Value, given: Given) -> Translation:
        names = ("rollout.samples_per_prompt", "actor_rollout_ref.rollout.n")
        samples = next((given[name] for name in reversed(list(given)) if name in names), 1)  # the latest
        prompts, per_prompt = whole(value), whole(samples)
        if prompts is None or per_prompt is None:
            raise ConfigError(f"{key}={value}: expected a whole number", hint="it counts prompts per optimizer step")
        responses = prompts * per_prompt
        return Translation({ours: responses}, inherited=dict.fromkeys(inherited, responses))

    return rule


def switch(companion: str, ours: str, default: float) -> Rule:
    """A switch with a companion coefficient. Off sets 0; on sets the given coefficient, or verl's default."""

    def rule(key: str, value: Value, given: Given) -> Translation:
        if word(value) not in ("true", "false"):
            raise _unsupported(key, value, ("true", "false"))
        return Translation({ours: given.get(companion, default) if is_true(value) else 0.0})

    return rule


def switched_by(switch_key: str, ours: str, inherited: str = "") -> Rule:
    """A value that has an effect only if its switch is on. A missing switch takes the value of `inherited`."""

    def rule(key: str, value: Value, given: Given) -> Translation:
        if is_true(given.get(switch_key, given.get(inherited, False))):
            return Translation({ours: value})
        return Translation({}, f"{key} has no effect: {switch_key} is not true")

    return rule


def truncation(key: str, value: Value, given: Given) -> Translation:
    if is_true(given.get("data.filter_overlong_prompts", False)):
        return Translation({})  # filtering removes every long prompt
    names = {"error": "error", "left": "truncate_left", "right": "truncate_right"}
    return mapped(names, "data.overlong_prompts")(key, value, given)


def filter_overlong(key: str, value: Value, given: Given) -> Translation:
    if is_true(value):
        return Translation({"data.overlong_prompts": "filter"})
    return only("false")(key, value, given)


def kl_loss_type(key: str, value: Value, _given: Given) -> Translation:
    name = word(value).removesuffix("+")
    if name not in KL_KINDS:
        raise _unsupported(key, value, KL_KINDS)
    note = f"{key}={value}: the loss uses the gradient of the KL; actor.kl_loss_unbiased=false uses the estimate's"
    same = word(value).endswith("+") or KL_KINDS[name] == "k2"
    return Translation({"actor.kl_loss_estimator": KL_KINDS[name]}, "" if same else note)


def truncated_ratio(_key: str, value: Value, _given: Given) -> Translation:
    if word(value) in ("-1", "-1.0", "null", "none", "false"):
        return Translation({})
    return Translation({"algorithm.correction": "tis", "algorithm.correction_high": value})


def rollout_is(key: str, value: Value, given: Given) -> Translation:
    if word(value) in ("null", "none", "false"):
        return Translation({})
    names = {name: row.name for row in CORRECTIONS.values() for name in row.verl}
    return mapped(names, "algorithm.correction")(key, value, given)


def shared_memory(key: str, value: Value, given: Given) -> Translation:
    if is_true(value):
        return Translation({"data.cache_dir": "/dev/shm/slipway-data"})
    return only("false")(key, value, given)


def loggers(_key: str, value: Value, _given: Given) -> Translation:
    """Console, metrics.jsonl and TensorBoard always record; `trainer.loggers` names the others."""
    names: list[Value] = list(value) if isinstance(value, list) else [name.strip() for name in str(value).split(",")]
    return Translation({"trainer.loggers": [name for name in names if name not in ("console", "tensorboard", "file")]})


def devices(key: str, value: Value, _given: Given) -> Translation:
    text = ",".join(map(str, value)) if isinstance(value, list) else value
    return Translation({key.removesuffix(".devices"): text})


def reward_model_alone(key: str, value: Value, given: Given) -> Translation:
    """Where verl has a reward model, its score is the reward."""
    return Translation({"reward.weight": 0.0}) if is_true(value) else only("false")(key, value, given)


def reward_model_input(_key: str, value: Value, _given: Given) -> Translation:
    """With a tokenizer named, verl decodes responses and applies the reward model's chat template."""
    return Translation({"reward.model.input": "tokens" if word(value) in ("null", "none") else "text"})


def checkpoints_to_keep(key: str, value: Value, given: Given) -> Translation:
    """A checkpoint holds actor and critic, so the larger of verl's two numbers counts; 0 or less keeps all."""
    values = [given.get(f"trainer.max_{role}_ckpt_to_keep", value) for role in ("actor", "critic")]
    numbers = [0 if word(one) in ("null", "none") else whole(one) for one in values]
    known = [number for number in numbers if number is not None]
    if len(known) < len(numbers):
        raise ConfigError(f"{key}={value}: expected a whole number or null", hint="it counts checkpoints to keep")
    return Translation({"trainer.keep_checkpoints": max(known) if min(known) > 0 else None})


def resume_mode(key: str, value: Value, given: Given) -> Translation:
    if word(value) == "resume_path":
        return Translation({})
    if word(value) == "auto":
        if "trainer.experiment_name" in given or "trainer.run_id" in given:
            return Translation({"trainer.resume": "auto"})
        return Translation({}, f"{key}=auto has no effect: a run without trainer.experiment_name is always a new one")
    return only("disable")(key, value, given)


def shard_size(ours: str) -> Rule:
    """verl's -1 is all ranks."""
    return lambda _key, value, _given: Translation({ours: None if whole(value) == -1 else value})


def fsdp_rules(theirs: str, role: str) -> dict[str, Rule]:
    """The keys of one of verl's FSDP sections."""
    ours = f"{role}.sharding"
    return {
        **no_effects(theirs, FSDP_KEYS, "FSDP2 chooses it"),
        f"{theirs}.param_offload": to(f"{ours}.param_offload"),
        f"{theirs}.optimizer_offload": to(f"{ours}.optimizer_offload"),
        f"{theirs}.offload_policy": to(f"{ours}.param_offload", f"{ours}.optimizer_offload"),
        f"{theirs}.fsdp_size": shard_size(f"{ours}.shard_size"),
        f"{theirs}.reshard_after_forward": to(f"{ours}.reshard_after_forward"),
    }


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


def strategy(role: str) -> Rule:
    """verl's name of a training backend."""
    return mapped({"fsdp": "fsdp", "fsdp2": "fsdp", "megatron": "megatron"}, f"{role}.backend")


def megatron_rules(theirs: str, role: str) -> dict[str, Rule]:
    """The keys of one of verl's Megatron sections. They have an effect only with `strategy=megatron`."""
    ours = f"{role}.sharding"
    rules = {
        **dict.fromkeys(
            MEGATRON_KEYS, no_effect("FSDP2 shards weights, gradients and optimizer states of Megatron's layers")
        ),
        **dict.fromkeys(RECOMPUTE_KEYS, no_effect(f"see {role}.activation_checkpointing")),
        "tensor_model_parallel_size": to(f"{ours}.tensor_parallel"),
        "pipeline_model_parallel_size": only("1"),
        "virtual_pipeline_model_parallel_size": only("null", "none", "1"),
        "context_parallel_size": only("1"),
        "expert_model_parallel_size": only("1"),
        "expert_tensor_parallel_size": only("null", "none", "1"),
        "use_dist_checkpointing": only("false"),
        "param_offload": to(f"{ours}.param_offload"),
        "optimizer_offload": to(f"{ours}.optimizer_offload"),
        "grad_offload": no_effect("gradients exist only during an update"),
        "sequence_parallel": no_effect("every rank holds whole activations between matrix products"),
    }
    return {f"{theirs}.megatron.{key}": _with_megatron(f"{theirs}.strategy", rule) for key, rule in rules.items()}


def _with_megatron(strategy_key: str, rule: Rule) -> Rule:
    def with_megatron(key: str, value: Value, given: Given) -> Translation:
        if word(given.get(strategy_key, "fsdp")) == "megatron":
            return rule(key, value, given)
        return Translation({}, f"{key} has no effect: {strategy_key} is not megatron")

    return with_megatron


def _unsupported(key: str, value: Value, accepted: Iterable[str]) -> ConfigError:
    return ConfigError(f"{key}={value} is not supported here", hint=f"supported: {', '.join(accepted)}")
