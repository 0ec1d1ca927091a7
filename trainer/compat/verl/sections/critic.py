"""Keys of verl's section `critic`."""

from trainer.compat.verl.rules import (
    Rule,
    dynamic_batches,
    loader_seed,
    mapped,
    no_effect,
    no_effects,
    only,
    optional,
    own_code,
    per_device,
    switched_by,
    to,
    to_responses,
)
from trainer.compat.verl.sections.model import dropout_rules, lora_alpha
from trainer.compat.verl.shared import (
    ACTOR,
    AGGREGATIONS,
    CHECKPOINT,
    CHECKPOINT_KEYS,
    PACKED,
    PROFILER_KEYS,
    TRACES,
)
from trainer.compat.verl.subsections.engines import engine_rules
from trainer.compat.verl.subsections.groups import CRITIC_ROLE, of_engine, per_rank, split_tokens, strategy
from trainer.compat.verl.subsections.megatron import megatron_rules
from trainer.compat.verl.subsections.sharding import fsdp_rules

_CRITIC_FORWARD = "critic.micro_batch_size or critic.micro_batch_tokens limits every forward pass"


RULES: dict[str, Rule] = {
    "critic.strategy": strategy(CRITIC_ROLE),
    "critic.enable": no_effect("algorithm.advantage decides whether there is a critic"),
    "critic.model.path": to("critic.path"),
    "critic.model.tokenizer_path": no_effect("actor and critic share the actor's tokenizer"),
    "critic.model.enable_gradient_checkpointing": to("critic.activation_checkpointing"),
    "critic.model.use_remove_padding": no_effect(PACKED),
    **fsdp_rules("critic.model.fsdp_config", CRITIC_ROLE),
    "critic.model.lora_rank": to("critic.lora.rank"),
    "critic.model.lora_alpha": lora_alpha("critic", "critic.model.lora_rank"),
    "critic.model.target_modules": to("critic.lora.target_modules"),
    "critic.model.trust_remote_code": own_code,
    "critic.model.external_lib": only("null"),
    **no_effects(
        "critic.model",
        ("use_shm", "enable_activation_offload", "use_liger", "use_fused_kernels", "fused_kernel_options.impl_backend"),
        "the critic loads and computes its model like the actor",
    ),
    "critic.model.override_config": only("{}"),
    **dropout_rules("critic.model.override_config"),
    **fsdp_rules("critic.fsdp_config", CRITIC_ROLE),
    **fsdp_rules("critic.fsdp", CRITIC_ROLE),
    "critic.data_loader_seed": loader_seed("critic.shuffle", f"{ACTOR}.shuffle"),
    **megatron_rules(CRITIC_ROLE),
    **engine_rules(CRITIC_ROLE),
    "critic.ppo_mini_batch_size": to_responses("critic.mini_batch_size"),
    "critic.ppo_micro_batch_size_per_gpu": optional("critic.micro_batch_size"),
    "critic.ppo_micro_batch_size": per_device("critic.micro_batch_size", CRITIC_ROLE.shares_rows),
    "critic.use_dynamic_bsz": per_rank(CRITIC_ROLE, dynamic_batches("critic.micro_batch_tokens", 32768)),
    "critic.ppo_max_token_len_per_gpu": per_rank(
        CRITIC_ROLE,
        switched_by("critic.use_dynamic_bsz", "critic.micro_batch_tokens", inherited=f"{ACTOR}.use_dynamic_bsz"),
    ),
    "critic.forward_micro_batch_size": no_effect(_CRITIC_FORWARD),
    "critic.forward_micro_batch_size_per_gpu": no_effect(_CRITIC_FORWARD),
    "critic.forward_max_token_len_per_gpu": no_effect(_CRITIC_FORWARD),
    "critic.cliprange_value": to("critic.clip_range_value"),
    "critic.loss_agg_mode": mapped(AGGREGATIONS, "critic.loss_aggregation"),
    "critic.shuffle": to("critic.shuffle"),
    "critic.ulysses_sequence_parallel_size": of_engine(CRITIC_ROLE, "fsdp", split_tokens(CRITIC_ROLE)),
    **no_effects("critic.checkpoint", CHECKPOINT_KEYS, CHECKPOINT),
    **no_effects("critic.profiler", ("enable", *PROFILER_KEYS), TRACES),
}
