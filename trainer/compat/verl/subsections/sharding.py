"""Keys of verl's FSDP sections, which several roles have."""

from trainer.compat.verl.rules import (
    Given,
    Rule,
    Translation,
    Value,
    is_true,
    no_effect,
    no_effects,
    same_seed,
    to,
    turns_on,
    whole,
)
from trainer.compat.verl.subsections.dtypes import dtype_rules
from trainer.compat.verl.subsections.groups import Role, of_engine, split_tokens

FSDP_KEYS = (
    *("optimizer_offload", "offload_policy", "fsdp_size", "reshard_after_forward", "forward_prefetch", "strategy"),
    *("wrap_policy", "wrap_policy.min_num_params", "wrap_policy.transformer_layer_cls_to_wrap"),
    *("use_orig_params", "use_torch_compile", "forward_only", "seed"),
    *("entropy_checkpointing", "entropy_from_logits_with_chunking", "entropy_from_logits_chunk_size"),
    *("pad_to_length", "pad_to_length_bucket", "use_no_sync_for_gradient_accumulation"),
)
# Types of a role that trains nothing: its weights are in the type in which it computes.
FROZEN_DTYPE_KEYS = (
    "mixed_precision",
    "model_dtype",
    "dtype",
    *(f"mixed_precision.{name}_dtype" for name in ("param", "reduce", "buffer")),
)
GRADIENTS = "gradients exist only during an update"


def determinism_seed(switch_key: str) -> Rule:
    """The seed of an engine that computes the same each time. Otherwise verl sets none."""

    def rule(key: str, value: Value, given: Given) -> Translation:
        if is_true(given.get(switch_key)):
            return same_seed(key, value, given)
        return no_effect(f"{switch_key} is not true")(key, value, given)

    return rule


def shard_size(ours: str) -> Rule:
    """verl's -1 is all ranks."""
    return lambda _key, value, _given: Translation({ours: None if whole(value) == -1 else value})


def fsdp_rules(theirs: str, role: Role) -> dict[str, Rule]:
    """The keys of one of verl's FSDP sections."""
    ours = f"{role.ours}.sharding"
    return {
        **no_effects(theirs, FSDP_KEYS, "FSDP2 chooses it"),
        **dtype_rules(theirs, role.ours),
        f"{theirs}.ulysses_sequence_parallel_size": of_engine(role, "fsdp", split_tokens(role)),
        f"{theirs}.seed": determinism_seed(f"{theirs}.full_determinism"),
        f"{theirs}.full_determinism": turns_on("trainer.deterministic"),
        f"{theirs}.param_offload": to(f"{ours}.param_offload"),
        f"{theirs}.optimizer_offload": to(f"{ours}.optimizer_offload"),
        f"{theirs}.grad_offload": no_effect(GRADIENTS),
        f"{theirs}.offload_policy": to(f"{ours}.param_offload", f"{ours}.optimizer_offload"),
        f"{theirs}.fsdp_size": shard_size(f"{ours}.shard_size"),
        f"{theirs}.reshard_after_forward": to(f"{ours}.reshard_after_forward"),
    }
