"""Keys of verl's section `actor_rollout_ref.actor`."""

from trainer.compat.verl.rules import (
    Given,
    Rule,
    Translation,
    Value,
    dynamic_batches,
    loader_seed,
    no_effect,
    no_effects,
    optional,
    per_device,
    switched_by,
    to,
    to_responses,
    whole,
    word,
)
from trainer.compat.verl.sections import losses
from trainer.compat.verl.sections.asynchronous import asynchronous
from trainer.compat.verl.shared import (
    ACTOR,
    CHECKPOINT,
    CHECKPOINT_KEYS,
    ENTROPY_KEYS,
    KERNELS,
    PACKED,
    PROFILER_KEYS,
    TRACES,
)
from trainer.compat.verl.subsections.engines import engine_rules, router_replay
from trainer.compat.verl.subsections.groups import ACTOR_ROLE, of_engine, per_rank, split_tokens, strategy
from trainer.compat.verl.subsections.megatron import megatron_rules
from trainer.compat.verl.subsections.sharding import fsdp_rules
from trainer.errors import ConfigError


def truncated_ratio(_key: str, value: Value, _given: Given) -> Translation:
    if word(value) in ("-1", "-1.0", "null", "none", "false"):
        return Translation({})
    return Translation({"algorithm.correction": "tis", "algorithm.correction_high": value})


def mini_batch(key: str, value: Value, given: Given) -> Translation:
    """verl counts its prompts. In asynchronous runs the batch follows from it."""
    batch, prompts = whole(given.get("data.train_batch_size")), whole(value)
    counts = "actor.mini_batch_size" not in given and not asynchronous(given)
    if counts and batch and prompts and batch % prompts:
        raise ConfigError(
            f"{key}={value} does not divide data.train_batch_size={batch}",
            hint=f"{key} counts prompts: make it divide data.train_batch_size",
        )
    return to_responses("actor.mini_batch_size", inherited=("critic.mini_batch_size",))(key, value, given)


RULES: dict[str, Rule] = {
    f"{ACTOR}.strategy": strategy(ACTOR_ROLE),
    f"{ACTOR}.ppo_mini_batch_size": mini_batch,
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": optional("actor.micro_batch_size"),
    f"{ACTOR}.ppo_micro_batch_size": per_device("actor.micro_batch_size", ACTOR_ROLE.shares_rows),
    f"{ACTOR}.use_dynamic_bsz": per_rank(ACTOR_ROLE, dynamic_batches("actor.micro_batch_tokens", 16384)),
    f"{ACTOR}.ppo_max_token_len_per_gpu": per_rank(
        ACTOR_ROLE, switched_by(f"{ACTOR}.use_dynamic_bsz", "actor.micro_batch_tokens")
    ),
    f"{ACTOR}.ppo_epochs": to("actor.ppo_epochs", inherited=("critic.ppo_epochs",)),
    **losses.RULES,
    f"{ACTOR}.router_replay.mode": router_replay(ACTOR_ROLE),
    f"{ACTOR}.tis_imp_ratio_cap": truncated_ratio,
    f"{ACTOR}.shuffle": to("actor.shuffle", inherited=("critic.shuffle",)),
    f"{ACTOR}.ulysses_sequence_parallel_size": of_engine(ACTOR_ROLE, "fsdp", split_tokens(ACTOR_ROLE)),
    **fsdp_rules(f"{ACTOR}.fsdp_config", ACTOR_ROLE),
    **megatron_rules(ACTOR_ROLE),
    **engine_rules(ACTOR_ROLE),
    **no_effects(
        ACTOR,
        ("calculate_sum_pi_squared", "sum_pi_squared_checkpointing"),
        "squared probabilities are computed where algorithm.advantage needs them",
    ),
    f"{ACTOR}.use_torch_compile": to("actor.compile"),
    **no_effects(ACTOR, ENTROPY_KEYS, KERNELS),
    f"{ACTOR}.use_fused_kernels": no_effect(KERNELS),
    **no_effects(ACTOR, ("use_remove_padding", "pad_to_length"), PACKED),
    f"{ACTOR}.use_prefix_grouper": no_effect(
        "a prompt is computed once for all of its responses, see actor.share_prompts"
    ),
    f"{ACTOR}.data_loader_seed": loader_seed(f"{ACTOR}.shuffle", "actor.shuffle"),
    **no_effects(f"{ACTOR}.checkpoint", CHECKPOINT_KEYS, CHECKPOINT),
    **no_effects(f"{ACTOR}.profiler", ("enable", *PROFILER_KEYS), TRACES),
    **no_effects("actor_rollout_ref.profiler", PROFILER_KEYS, TRACES),
}
