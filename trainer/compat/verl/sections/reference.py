"""Keys of verl's section `actor_rollout_ref.ref`."""

from trainer.compat.verl.rules import Rule, no_effect, no_effects, only, to
from trainer.compat.verl.shared import ENTROPY_KEYS, KERNELS, LOG_PROB_KEYS, PACKED, PROFILER_KEYS, REF, TRACES
from trainer.compat.verl.subsections import engines, megatron
from trainer.compat.verl.subsections.sharding import FROZEN_DTYPE_KEYS, FSDP_KEYS
from trainer.compat.verl.subsections.transformer_config import transformer_rules

_ACTOR_SHARDING = "the reference uses the actor's sharding; see actor.sharding"
_COMPUTED = "the reference is kept and computes in model.dtype"
# Layout keys of a role that trains nothing, besides those that have no effect for any role.
_VEOMNI = ("optimizer_offload", "seed", "enable_full_shard", "enable_fsdp_offload", "attn_implementation")
_TORCHTITAN = ("optimizer_offload", "seed", "reshard_after_forward", "use_torch_compile", "activation_checkpoint")
_FORWARD = "actor.micro_batch_size or actor.micro_batch_tokens limits every forward pass of actor and reference"


RULES: dict[str, Rule] = {
    f"{REF}.strategy": no_effect("the reference uses the actor's backend; see actor.backend"),
    f"{REF}.model": only("null"),
    f"{REF}.ulysses_sequence_parallel_size": no_effect(_ACTOR_SHARDING),
    **no_effects(REF, LOG_PROB_KEYS, _FORWARD),
    **no_effects(f"{REF}.fsdp_config", FSDP_KEYS, _ACTOR_SHARDING),
    **no_effects(f"{REF}.fsdp_config", FROZEN_DTYPE_KEYS, _COMPUTED),
    f"{REF}.fsdp_config.param_offload": to("reference.param_offload"),
    f"{REF}.fsdp_config.ulysses_sequence_parallel_size": no_effect(_ACTOR_SHARDING),
    **no_effects(f"{REF}.megatron", megatron.FROZEN, _ACTOR_SHARDING),
    f"{REF}.megatron.dtype": no_effect(_COMPUTED),
    **no_effects(f"{REF}.veomni", (*engines.SIZES["veomni"], *engines.VEOMNI, *_VEOMNI), _ACTOR_SHARDING),
    **no_effects(
        f"{REF}.torchtitan", (*engines.SIZES["torchtitan"], *engines.TORCHTITAN, *_TORCHTITAN), _ACTOR_SHARDING
    ),
    **{f"{REF}.{engine}.param_offload": to("reference.param_offload") for engine in engines.SIZES},
    **{f"{REF}.megatron.{key}": rule for key, rule in transformer_rules().items()},
    f"{REF}.megatron.use_dist_checkpointing": megatron.dist_checkpointing,
    f"{REF}.megatron.param_offload": to("reference.param_offload"),
    **no_effects(REF, ENTROPY_KEYS, KERNELS),
    f"{REF}.pad_to_length": no_effect(PACKED),
    f"{REF}.use_torch_compile": no_effect("the reference is compiled if the actor is; see actor.compile"),
    **no_effects(f"{REF}.profiler", ("enable", *PROFILER_KEYS), TRACES),
}
