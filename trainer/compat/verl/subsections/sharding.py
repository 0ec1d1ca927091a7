"""Keys of verl's FSDP and Megatron sections, which several roles have."""

from trainer.compat.verl.rules import (
    Given,
    Rule,
    Translation,
    Value,
    is_true,
    mapped,
    no_effect,
    no_effects,
    only,
    same_seed,
    to,
    turns_on,
    whole,
    word,
)
from trainer.compat.verl.subsections.dtypes import dtype_rules
from trainer.compat.verl.subsections.transformer_config import transformer_rules

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
MEGATRON_KEYS = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel"),
    *("optimizer_offload", "grad_offload", "use_distributed_optimizer", "use_dist_checkpointing"),
    *("dist_checkpointing_path", "dist_checkpointing_prefix", "seed", "use_mbridge", "vanilla_mbridge"),
    *("forward_only", "dtype", "use_remove_padding", "extra", "extra.*"),
    *("override_ddp_config", "override_ddp_config.*", "override_mcore_model_config", "override_mcore_model_config.*"),
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


def fsdp_rules(theirs: str, role: str) -> dict[str, Rule]:
    """The keys of one of verl's FSDP sections."""
    ours = f"{role}.sharding"
    return {
        **no_effects(theirs, FSDP_KEYS, "FSDP2 chooses it"),
        **dtype_rules(theirs, role),
        f"{theirs}.ulysses_sequence_parallel_size": only("1"),
        f"{theirs}.seed": determinism_seed(f"{theirs}.full_determinism"),
        f"{theirs}.full_determinism": turns_on("trainer.deterministic"),
        f"{theirs}.param_offload": to(f"{ours}.param_offload"),
        f"{theirs}.optimizer_offload": to(f"{ours}.optimizer_offload"),
        f"{theirs}.grad_offload": no_effect(GRADIENTS),
        f"{theirs}.offload_policy": to(f"{ours}.param_offload", f"{ours}.optimizer_offload"),
        f"{theirs}.fsdp_size": shard_size(f"{ours}.shard_size"),
        f"{theirs}.reshard_after_forward": to(f"{ours}.reshard_after_forward"),
    }


def strategy(role: str) -> Rule:
    """verl's name of a training backend."""
    return mapped({"fsdp": "fsdp", "fsdp2": "fsdp", "megatron": "megatron"}, f"{role}.backend")


def is_megatron(strategy_key: str, given: Given) -> bool:
    """Whether a role trains with Megatron: verl's `model_engine` chooses every role's strategy that is not given."""
    return word(given.get(strategy_key, given.get("model_engine"))) == "megatron"


def megatron_rules(theirs: str, role: str) -> dict[str, Rule]:
    """The keys of one of verl's Megatron sections. They have an effect only if it trains with Megatron."""
    ours = f"{role}.sharding"
    rules = {
        **dict.fromkeys(
            MEGATRON_KEYS, no_effect("FSDP2 shards weights, gradients and optimizer states of Megatron's layers")
        ),
        **transformer_rules(),
        "tensor_model_parallel_size": to(f"{ours}.tensor_parallel"),
        "pipeline_model_parallel_size": only("1"),
        "virtual_pipeline_model_parallel_size": only("null", "none", "1"),
        "context_parallel_size": only("1"),
        "expert_model_parallel_size": only("1"),
        "expert_tensor_parallel_size": only("null", "none", "1"),
        "use_dist_checkpointing": only("false"),
        "seed": same_seed,
        "param_offload": to(f"{ours}.param_offload"),
        "optimizer_offload": to(f"{ours}.optimizer_offload"),
        "grad_offload": no_effect(GRADIENTS),
        "sequence_parallel": no_effect("every rank holds whole activations between matrix products"),
    }
    return {f"{theirs}.megatron.{key}": _with_megatron(f"{theirs}.strategy", rule) for key, rule in rules.items()}


def _with_megatron(strategy_key: str, rule: Rule) -> Rule:
    def with_megatron(key: str, value: Value, given: Given) -> Translation:
        if is_megatron(strategy_key, given):
            return rule(key, value, given)
        return Translation({}, f"{key} has no effect: {strategy_key} is not megatron")

    return with_megatron
