"""Keys of published tuning guides."""

from trainer.compat.verl.rules import Given, Rule, Translation, Value, no_effect, no_effects, to


def devices(key: str, value: Value, _given: Given) -> Translation:
    text = ",".join(map(str, value)) if isinstance(value, list) else value
    return Translation({key.removesuffix(".devices"): text})


RULES: dict[str, Rule] = {
    "actor.dtype": to("model.dtype"),
    "critic.dtype": no_effect("model.dtype applies to every role"),
    "actor.use_flash_attention": no_effect("attention always uses the fastest kernel available for packed rows"),
    "actor.enable_resharding": to("actor.sharding.reshard_after_forward"),
    "actor.resharding_interval": to("actor.sharding.resharding_interval"),
    "actor.use_reduce_scatter": no_effect("gradients always use reduce-scatter"),
    "critic.use_gradient_checkpointing": to("critic.activation_checkpointing"),
    "critic.grad_accumulation_steps": no_effect(
        "critic.micro_batch_size decides how many passes an optimizer step takes"
    ),
    "critic.use_torch_compile": to("critic.compile"),
    "ddp_config.timeout": to("trainer.worker_timeout"),
    "ddp_config.backend": no_effect("the backend is NCCL on GPUs and gloo on CPU"),
    "ddp_config.init_method": no_effect("ranks find each other through Ray"),
    **no_effects(
        "device_mapping",
        ("actor.type", "critic.type", "reference.type", "reward.type", "rollout.type"),
        "weights are always sharded over the devices of a role",
    ),
    "device_mapping.actor.devices": devices,
    "device_mapping.critic.devices": devices,
    "device_mapping.reward.devices": devices,
    "device_mapping.rollout.devices": devices,
    "device_mapping.reference.devices": devices,
    "data.use_mmap": no_effect("prompts are always memory-mapped"),
}
