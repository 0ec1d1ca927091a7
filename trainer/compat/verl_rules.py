"""How a setting of verl's becomes one of ours: rules, of which `trainer/compat/verl_keys.py` gives each key one."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from trainer.errors import ConfigError

Given = Mapping[str, str]

KL_KINDS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


@dataclass(frozen=True)
class Translation:
    """Our settings for one of verl's, and what the user should know about it, if anything."""

    settings: dict[str, str]
    note: str = ""


Rule = Callable[[str, str, Given], Translation]
"""From a key, its value, and all of verl's keys that are given."""


def to(*ours: str) -> Rule:
    """The same value under our key; under several, for what verl hands on from one role to another."""
    return lambda _key, value, _given: Translation(dict.fromkeys(ours, value))


def mapped(values: Mapping[str, str], *ours: str) -> Rule:
    """Our key with our word for each value; other values are refused."""

    def rule(key: str, value: str, _given: Given) -> Translation:
        if value.lower() not in values:
            raise _unsupported(key, value, values)
        return Translation(dict.fromkeys(ours, values[value.lower()]))

    return rule


def only(*accepted: str) -> Rule:
    """Nothing to set, because the accepted values are what always happens here; others are refused."""

    def rule(key: str, value: str, _given: Given) -> Translation:
        if value.lower() not in accepted:
            raise _unsupported(key, value, accepted)
        return Translation({})

    return rule


def no_effect(reason: str) -> Rule:
    """Accepted and left aside."""
    return lambda key, _value, _given: Translation({}, f"{key} has no effect: {reason}")


def to_responses(*ours: str) -> Rule:
    """verl counts the prompts of a mini-batch, we its responses."""

    def rule(key: str, value: str, given: Given) -> Translation:
        samples = given.get("rollout.samples_per_prompt", given.get("actor_rollout_ref.rollout.n", "1"))
        if not (value.isdecimal() and samples.isdecimal()):
            raise ConfigError(f"{key}={value}: expected a whole number", hint="it counts prompts per optimizer step")
        return Translation(dict.fromkeys(ours, str(int(value) * int(samples))))

    return rule


def switch(companion: str, ours: str, default: str) -> Rule:
    """A switch beside a coefficient: off is coefficient 0, on is verl's default unless the coefficient is given."""

    def rule(key: str, value: str, given: Given) -> Translation:
        if value.lower() not in ("true", "false"):
            raise _unsupported(key, value, ("true", "false"))
        return Translation({ours: given.get(companion, default) if value.lower() == "true" else "0"})

    return rule


def switched_by(switch_key: str, ours: str, inherited: str = "") -> Rule:
    """A value that counts only if its switch is on, or if not given, the one that verl inherits it from."""

    def rule(key: str, value: str, given: Given) -> Translation:
        if given.get(switch_key, given.get(inherited, "false")).lower() == "true":
            return Translation({ours: value})
        return Translation({}, f"{key} has no effect: {switch_key} is not true")

    return rule


def truncation(key: str, value: str, given: Given) -> Translation:
    if given.get("data.filter_overlong_prompts", "false").lower() == "true":
        return Translation({})  # what is left after filtering is short enough
    names = {"error": "error", "left": "truncate_left", "right": "truncate_right"}
    return mapped(names, "data.overlong_prompts")(key, value, given)


def filter_overlong(key: str, value: str, given: Given) -> Translation:
    if value.lower() == "true":
        return Translation({"data.overlong_prompts": "filter"})
    return only("false")(key, value, given)


def kl_loss_type(key: str, value: str, _given: Given) -> Translation:
    name = value.lower().removesuffix("+")
    if name not in KL_KINDS:
        raise _unsupported(key, value, KL_KINDS)
    note = f"{key}={value}: its gradient is that of the KL; actor.kl_loss_unbiased=false takes the estimate's"
    same = value.endswith("+") or KL_KINDS[name] == "k2"
    return Translation({"actor.kl_loss_estimator": KL_KINDS[name]}, "" if same else note)


def truncated_ratio(_key: str, value: str, _given: Given) -> Translation:
    if value.lower() in ("-1", "null", "none", "false"):
        return Translation({})
    return Translation({"algorithm.correction": "tis", "algorithm.correction_high": value})


def rollout_is(key: str, value: str, given: Given) -> Translation:
    if value.lower() in ("null", "none", "false"):
        return Translation({})
    return mapped({"token": "tis", "true": "tis"}, "algorithm.correction")(key, value, given)


def shared_memory(key: str, value: str, given: Given) -> Translation:
    if value.lower() == "true":
        return Translation({"data.cache_dir": "/dev/shm/slipway-data"})
    return only("false")(key, value, given)


def loggers(_key: str, value: str, _given: Given) -> Translation:
    names = [name.strip(" \"'") for name in value.strip("[]\"' ").split(",") if name.strip(" \"'")]
    others = [name for name in names if name not in ("console", "tensorboard", "file")]  # always written
    return Translation({"trainer.loggers": f"[{','.join(others)}]"})


def devices(key: str, value: str, _given: Given) -> Translation:
    return Translation({key.removesuffix(".devices"): value.strip("[]\"' ").replace('"', "")})


def reward_model_alone(key: str, value: str, given: Given) -> Translation:
    """Where verl has a reward model, its score is the reward."""
    return Translation({"reward.weight": "0"}) if value.lower() == "true" else only("false")(key, value, given)


def reward_model_input(_key: str, value: str, _given: Given) -> Translation:
    """With a tokenizer named, verl decodes responses and applies the reward model's chat template."""
    return Translation({"reward.model.input": "tokens" if value.lower() in ("null", "none") else "text"})


def checkpoints_to_keep(key: str, value: str, given: Given) -> Translation:
    """A checkpoint here has actor and critic, so the larger of verl's two numbers counts; 0 or less keeps all."""
    values = [given.get(f"trainer.max_{role}_ckpt_to_keep", value) for role in ("actor", "critic")]
    if not all(re.fullmatch(r"-?\d+|null|none", one.lower()) for one in values):
        raise ConfigError(f"{key}={value}: expected a whole number or null", hint="it counts checkpoints to keep")
    numbers = [int(one) if one.lstrip("-").isdecimal() else 0 for one in values]
    return Translation({"trainer.keep_checkpoints": str(max(numbers)) if min(numbers) > 0 else "null"})


def resume_mode(key: str, value: str, given: Given) -> Translation:
    if value.lower() == "resume_path":
        return Translation({})
    if value.lower() == "auto":
        if "trainer.experiment_name" in given or "trainer.run_id" in given:
            return Translation({"trainer.resume": "auto"})
        return Translation({}, f"{key}=auto has no effect: a run without trainer.experiment_name is always a new one")
    return only("disable")(key, value, given)


def shard_size(ours: str) -> Rule:
    """verl's -1 is all ranks."""
    return lambda _key, value, _given: Translation({ours: "null" if value == "-1" else value})


def fsdp_rules(theirs: str, role: str) -> dict[str, Rule]:
    """The keys of one of verl's FSDP sections."""
    ours = f"{role}.sharding"
    return {
        f"{theirs}.param_offload": to(f"{ours}.param_offload"),
        f"{theirs}.optimizer_offload": to(f"{ours}.optimizer_offload"),
        f"{theirs}.offload_policy": to(f"{ours}.param_offload", f"{ours}.optimizer_offload"),
        f"{theirs}.fsdp_size": shard_size(f"{ours}.shard_size"),
        f"{theirs}.reshard_after_forward": to(f"{ours}.reshard_after_forward"),
        f"{theirs}.*": no_effect("FSDP2 chooses it"),
    }


def strategy(role: str) -> Rule:
    """verl's word for whose layers compute."""
    return mapped({"fsdp": "fsdp", "fsdp2": "fsdp", "megatron": "megatron"}, f"{role}.backend")


def megatron_rules(theirs: str, role: str) -> dict[str, Rule]:
    """The keys of one of verl's Megatron sections, which counts with `strategy=megatron` only."""
    ours = f"{role}.sharding"
    rules = {
        "tensor_model_parallel_size": to(f"{ours}.tensor_parallel"),
        "pipeline_model_parallel_size": only("1"),
        "virtual_pipeline_model_parallel_size": only("null", "none", "1"),
        "context_parallel_size": only("1"),
        "expert_model_parallel_size": only("1"),
        "expert_tensor_parallel_size": only("null", "none", "1"),
        "use_dist_checkpointing": only("false"),
        "param_offload": to(f"{ours}.param_offload"),
        "optimizer_offload": to(f"{ours}.optimizer_offload"),
        "grad_offload": no_effect("gradients are there in an update only"),
        "sequence_parallel": no_effect("activations between the matrix products are whole on every rank"),
        "*recompute*": no_effect(f"see {role}.activation_checkpointing"),
        "*": no_effect("FSDP2 shards weights, gradients and optimizer states of Megatron's layers"),
    }
    return {f"{theirs}.megatron.{key}": _with_megatron(f"{theirs}.strategy", rule) for key, rule in rules.items()}


def _with_megatron(strategy_key: str, rule: Rule) -> Rule:
    def with_megatron(key: str, value: str, given: Given) -> Translation:
        if given.get(strategy_key, "fsdp").lower() == "megatron":
            return rule(key, value, given)
        return Translation({}, f"{key} has no effect: {strategy_key} is not megatron")

    return with_megatron


def _unsupported(key: str, value: str, accepted: Iterable[str]) -> ConfigError:
    return ConfigError(f"{key}={value} is not supported here", hint=f"supported: {', '.join(accepted)}")
