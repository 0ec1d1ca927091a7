"""Keys of verl's section `actor_rollout_ref.actor`."""

from trainer.algorithms.registry import POLICY_LOSSES
from trainer.compat.verl.rules import (
    KL_KINDS,
    Given,
    Rule,
    Translation,
    Value,
    mapped,
    no_effect,
    no_effects,
    only,
    switch,
    switched_by,
    to,
    to_responses,
    unsupported,
    word,
)
from trainer.compat.verl.sharding import fsdp_rules, megatron_rules, strategy
from trainer.compat.verl.shared import (
    ACTOR,
    AGGREGATIONS,
    CHECKPOINT,
    CHECKPOINT_KEYS,
    DYNAMIC,
    ENTROPY_KEYS,
    KERNELS,
    PACKED,
    PROFILER_KEYS,
    TRACES,
)

_POLICY_LOSSES = {name: row.name for row in POLICY_LOSSES.values() for name in row.verl}


def kl_loss_type(key: str, value: Value, _given: Given) -> Translation:
    name = word(value).removesuffix("+")
    if name not in KL_KINDS:
        raise unsupported(key, value, KL_KINDS)
    note = f"{key}={value}: the loss uses the gradient of the KL; actor.kl_loss_unbiased=false uses the estimate's"
    same = word(value).endswith("+") or KL_KINDS[name] == "k2"
    return Translation({"actor.kl_loss_estimator": KL_KINDS[name]}, "" if same else note)


def truncated_ratio(_key: str, value: Value, _given: Given) -> Translation:
    if word(value) in ("-1", "-1.0", "null", "none", "false"):
        return Translation({})
    return Translation({"algorithm.correction": "tis", "algorithm.correction_high": value})


RULES: dict[str, Rule] = {
    f"{ACTOR}.strategy": strategy("actor"),
    f"{ACTOR}.ppo_mini_batch_size": to_responses("actor.mini_batch_size", inherited=("critic.mini_batch_size",)),
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": to("actor.micro_batch_size"),
    f"{ACTOR}.ppo_micro_batch_size": only("null"),
    f"{ACTOR}.use_dynamic_bsz": no_effect(DYNAMIC),
    f"{ACTOR}.ppo_max_token_len_per_gpu": switched_by(f"{ACTOR}.use_dynamic_bsz", "actor.micro_batch_tokens"),
    f"{ACTOR}.ppo_epochs": to("actor.ppo_epochs", inherited=("critic.ppo_epochs",)),
    f"{ACTOR}.clip_ratio": to("actor.clip_ratio"),
    f"{ACTOR}.clip_ratio_low": to("actor.clip_ratio_low"),
    f"{ACTOR}.clip_ratio_high": to("actor.clip_ratio_high"),
    f"{ACTOR}.clip_ratio_c": to("actor.clip_dual"),
    f"{ACTOR}.policy_loss.loss_mode": mapped(_POLICY_LOSSES, "actor.policy_loss"),
    f"{ACTOR}.loss_agg_mode": mapped(AGGREGATIONS, "actor.loss_aggregation", inherited=("critic.loss_aggregation",)),
    f"{ACTOR}.entropy_coeff": to("actor.entropy_coefficient"),
    f"{ACTOR}.use_kl_loss": switch(f"{ACTOR}.kl_loss_coef", "actor.kl_loss_coefficient", 0.001),
    f"{ACTOR}.kl_loss_coef": switched_by(f"{ACTOR}.use_kl_loss", "actor.kl_loss_coefficient"),
    f"{ACTOR}.kl_loss_type": kl_loss_type,
    f"{ACTOR}.tis_imp_ratio_cap": truncated_ratio,
    f"{ACTOR}.grad_clip": to("actor.max_gradient_norm"),
    f"{ACTOR}.shuffle": only("false"),
    f"{ACTOR}.ulysses_sequence_parallel_size": only("1"),
    **fsdp_rules(f"{ACTOR}.fsdp_config", "actor"),
    **megatron_rules(ACTOR, "actor"),
    f"{ACTOR}.use_torch_compile": to("actor.compile"),
    **no_effects(ACTOR, ENTROPY_KEYS, KERNELS),
    f"{ACTOR}.use_fused_kernels": no_effect(KERNELS),
    f"{ACTOR}.use_remove_padding": no_effect(PACKED),
    **no_effects(f"{ACTOR}.checkpoint", CHECKPOINT_KEYS, CHECKPOINT),
    **no_effects(f"{ACTOR}.profiler", ("enable", *PROFILER_KEYS), TRACES),
}
