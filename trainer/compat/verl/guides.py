"""Keys of published tuning guides, on the command line and in their YAML files."""

from trainer.compat.verl.rules import Given, Rule, Translation, Value, no_effect, only, to, word
from trainer.errors import ConfigError

_GROUPS = {
    "actor": "actor",
    "critic": "critic",
    "reference": "reference",
    "rollout": "rollout",
    "reward": "reward",
    "reward_model": "reward",
}
_ACTOR_DTYPES = ("model.dtype", "actor.dtype", "actor.model_config.dtype")


def devices(role: str) -> Rule:
    """The devices of a role, as text or as a list of texts."""

    def rule(_key: str, value: Value, _given: Given) -> Translation:
        text = ",".join(map(str, value)) if isinstance(value, list) else value
        return Translation({f"device_mapping.{role}": text})

    return rule


def kind_of_group(key: str, value: Value, given: Given) -> Translation:
    """`tp`, `dp` and `single` say how devices share a model."""
    only("tp", "dp", "single", "fsdp")(key, value, given)
    return no_effect("weights are sharded over the devices of a role; see sharding.tensor_parallel")(key, value, given)


def dtype(_key: str, value: Value, _given: Given) -> Translation:
    return Translation({"model.dtype": _name(value)})


def critic_dtype(key: str, value: Value, given: Given) -> Translation:
    """Actor and critic compute in one type."""
    actor = next((_name(given[name]) for name in _ACTOR_DTYPES if name in given), _name(value))
    if actor != _name(value):
        raise ConfigError(
            f"{key}={value} differs from the actor's {actor}", hint="set model.dtype, which applies to both roles"
        )
    return Translation({}, inherited={"model.dtype": _name(value)})


def _name(value: Value) -> str:
    return word(value).removeprefix("torch.")


_ROLE_KEYS: dict[str, Rule] = {
    "use_flash_attention": no_effect("attention always uses the fastest kernel available for packed rows"),
    "use_reduce_scatter": no_effect("gradients always use reduce-scatter"),
    "grad_accumulation_steps": no_effect("micro_batch_size decides how many passes an optimizer step takes"),
}


def role_rules(role: str) -> dict[str, Rule]:
    """The keys that a role has directly, or in one of the guides' subsections."""
    ours: dict[str, Rule] = {
        "dtype": dtype if role == "actor" else critic_dtype,
        "enable_resharding": to(f"{role}.sharding.reshard_after_forward"),
        "use_gradient_checkpointing": to(f"{role}.activation_checkpointing"),
        "use_torch_compile": to(f"{role}.compile"),
        "resharding_interval": to(f"{role}.sharding.resharding_interval"),
        **_ROLE_KEYS,
    }
    sections = ("", "model_config.", "engine_config.", "training_config.")
    return {f"{role}.{section}{name}": rule for section in sections for name, rule in ours.items()}


def ddp_rules(section: str) -> dict[str, Rule]:
    return {
        f"{section}.timeout": to("trainer.worker_timeout"),
        f"{section}.backend": no_effect("the backend is NCCL on GPUs and gloo on CPU"),
        f"{section}.init_method": no_effect("ranks find each other through Ray"),
    }


RULES: dict[str, Rule] = {
    **role_rules("actor"),
    **role_rules("critic"),
    **ddp_rules("ddp_config"),
    **ddp_rules("trainer.ddp_config"),
    **{f"{section}{group}.type": kind_of_group for section in ("", "device_mapping.") for group in _GROUPS},
    **{
        f"{section}{group}.devices": devices(role)
        for section in ("", "device_mapping.")
        for group, role in _GROUPS.items()
    },
    "data.use_mmap": no_effect("prompts are always memory-mapped"),
}
