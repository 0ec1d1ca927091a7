"""Keys of verl's sections `veomni` and `torchtitan`. They have an effect only with the engine of that name."""

from trainer.compat.verl.rules import (
    Given,
    Rule,
    Translation,
    Value,
    mapped,
    no_effect,
    only,
    to,
    turns_on,
    unsupported,
    whole,
    word,
)
from trainer.compat.verl.shared import CHECKPOINT, KERNELS, PACKED
from trainer.compat.verl.subsections.groups import (
    Role,
    of_engine,
    split_experts,
    split_layers,
    split_matrices,
    split_tokens,
)
from trainer.compat.verl.subsections.sharding import determinism_seed

_ATTENTION = ("eager", "sdpa", *(f"{prefix}flash_attention_{number}" for prefix in ("", "veomni_") for number in "234"))
_LOADED = "FSDP2 shards the weights as they are read from model.path"
# Keys that choose kernels, memory or the way weights are read, and why they have no effect.
VEOMNI: dict[str, str] = {
    **dict.fromkeys(
        (
            *("cross_entropy_loss_implementation", "rms_norm_implementation", "swiglu_mlp_implementation"),
            *("rotary_pos_emb_implementation", "rms_norm_gated_implementation"),
            *("causal_conv1d_implementation", "chunk_gated_delta_rule_implementation", "moe_implementation"),
            *("load_balancing_loss_implementation", "use_torch_compile", "forward_prefetch", "enable_reentrant"),
            *("entropy_from_logits_with_chunking", "entropy_from_logits_chunk_size", "entropy_checkpointing"),
        ),
        KERNELS,
    ),
    **dict.fromkeys(("init_device", "force_use_huggingface", "basic_modules", "strategy", "forward_only"), _LOADED),
    **dict.fromkeys(
        (
            "enable_async_activation_offload",
            "activation_offload_modules",
            "activation_offload_host_cache_limit_gb",
        ),
        "activations stay on the device; see actor.activation_checkpointing",
    ),
    **dict.fromkeys(("pad_to_length", "pad_to_length_bucket"), PACKED),
    "ckpt_manager": CHECKPOINT,
}
TORCHTITAN: dict[str, str] = {
    **dict.fromkeys(
        (
            *("attn_type", "spmd_backend", "forward_prefetch", "entropy_from_logits_with_chunking"),
            *("entropy_from_logits_chunk_size", "entropy_checkpointing", "max_seq_len"),
        ),
        KERNELS,
    ),
    **dict.fromkeys(
        ("data_parallel_size", "use_orig_params", "wrap_policy.min_num_params", "strategy", "forward_only"), _LOADED
    ),
}
SIZES = {
    "veomni": ("ulysses_parallel_size", "expert_parallel_size", "fsdp_size"),
    "torchtitan": (
        *("data_parallel_replicate_size", "data_parallel_shard_size", "tensor_parallel_size", "context_parallel_size"),
        *("pipeline_parallel_size", "expert_parallel_size", "expert_tensor_parallel_size"),
    ),
}


def copy_of_weights(role: Role, replicas: str = "") -> Rule:
    """`sharding.shard_size` of engines that count groups. Without several `replicas`, all ranks share one copy."""

    def rule(_key: str, value: Value, given: Given) -> Translation:
        groups = whole(value) or -1
        several = not replicas or (whole(given.get(replicas)) or 1) > 1
        size = groups * role.splits_tokens(given) if groups > 0 and several else None
        return Translation({f"{role.ours}.sharding.shard_size": size})

    return rule


def router_replay(role: Role) -> Rule:
    """verl's mode of repeating experts, which only the actor has: R2 as in its own pass, R3 as in the engine."""
    modes = {"r2": "recompute", "r3": "engine"} if role.ours == "actor" else {}

    def rule(key: str, value: Value, _given: Given) -> Translation:
        if word(value) == "disabled":
            return Translation({})
        if word(value) not in modes:
            raise unsupported(key, value, ("disabled", *(mode.upper() for mode in modes)))
        return Translation({"actor.router_replay": modes[word(value)]})

    return rule


def engine_rules(role: Role) -> dict[str, Rule]:
    """The keys of verl's sections `veomni` and `torchtitan` of a role."""
    ours, sharding = role.ours, f"{role.ours}.sharding"
    offloaded = to(f"{sharding}.param_offload", f"{sharding}.optimizer_offload")
    shared: dict[str, Rule] = {
        "param_offload": to(f"{sharding}.param_offload"),
        "optimizer_offload": to(f"{sharding}.optimizer_offload"),
        "expert_parallel_size": split_experts(role),
        "full_determinism": turns_on("trainer.deterministic"),
    }
    veomni = f"{role.theirs}.veomni"
    titan = f"{role.theirs}.torchtitan"
    rules: dict[str, dict[str, Rule]] = {
        "veomni": {
            **{key: no_effect(reason) for key, reason in VEOMNI.items()},
            **shared,
            "ulysses_parallel_size": split_tokens(role),
            "fsdp_size": copy_of_weights(role),
            "enable_full_shard": to(f"{sharding}.reshard_after_forward"),
            "enable_fsdp_offload": offloaded,
            "attn_implementation": only(*_ATTENTION),
            "mixed_precision": only("true"),
            "qat_implementation": only("none", "null"),
            "dsa_indexer_implementation": only("eager"),
            "dsa_attention_implementation": only("eager"),
            "mhc_implementation": only("eager"),
            "load_checkpoint_path": only("null"),
            "router_replay.mode": router_replay(role),
            "seed": determinism_seed(f"{veomni}.full_determinism"),
        },
        "torchtitan": {
            **{key: no_effect(reason) for key, reason in TORCHTITAN.items()},
            **shared,
            "context_parallel_size": split_tokens(role),
            "tensor_parallel_size": split_matrices(role),
            "pipeline_parallel_size": split_layers,
            "expert_tensor_parallel_size": split_experts(role, "expert_matrices"),
            "data_parallel_replicate_size": only_counts,
            "data_parallel_shard_size": copy_of_weights(role, f"{titan}.data_parallel_replicate_size"),
            "reshard_after_forward": mapped(
                {"default": "true", "always": "true", "never": "false"}, f"{sharding}.reshard_after_forward"
            ),
            "activation_checkpoint": mapped(
                {"selective": "true", "full": "true", "none": "false"}, f"{ours}.activation_checkpointing"
            ),
            "offload_policy": offloaded,
            "use_torch_compile": to(f"{ours}.compile"),
            "mixed_precision": no_effect("torchtitan computes in bfloat16 whatever it says"),
            "dtype": only("bfloat16", "null"),
            "seed": determinism_seed(f"{titan}.full_determinism"),
        },
    }
    return {
        f"{role.theirs}.{name}.{key}": of_engine(role, name, rule)
        for name, inner in rules.items()
        for key, rule in inner.items()
    }


def only_counts(_key: str, _value: Value, _given: Given) -> Translation:
    """Read with `data_parallel_shard_size`."""
    return Translation({})
