"""Keys of verl's Megatron sections.

They have an effect only if the role trains with verl's engine of that name. Transformers' layers and FSDP2 take its
place; `actor.backend=megatron` selects Megatron-Core's layers.
"""

from trainer.compat.verl.rules import Given, Rule, Translation, Value, is_true, mapped, no_effect, only, same_seed, to
from trainer.compat.verl.shared import CHECKPOINT, KERNELS, PACKED
from trainer.compat.verl.subsections.dtypes import compute_type
from trainer.compat.verl.subsections.engines import router_replay
from trainer.compat.verl.subsections.groups import (
    Role,
    of_engine,
    split_experts,
    split_layers,
    split_matrices,
    split_tokens,
)
from trainer.compat.verl.subsections.sharding import GRADIENTS
from trainer.compat.verl.subsections.transformer_config import transformer_rules

SIZES = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"),
)
_SHARDED = "FSDP2 shards weights, gradients and optimizer states"
_READ = "weights are read from model.path and not from a converted checkpoint"
# What each key is about, and why it has no effect. Roles that train nothing have these keys, too.
LAYOUT: dict[str, str] = {
    **dict.fromkeys(("use_distributed_optimizer", "use_megatron_fsdp", "override_ddp_config"), _SHARDED),
    **dict.fromkeys(("dist_checkpointing_path", "dist_checkpointing_prefix"), _READ),
    **dict.fromkeys(("use_mbridge", "vanilla_mbridge"), "Transformers reads and writes weights"),
    **dict.fromkeys(("dist_ckpt_optim_fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient"), CHECKPOINT),
    **dict.fromkeys(
        ("use_remove_padding", "pad_bshd_to_minibatch_max", "pad_to_length", "pad_to_length_bucket"), PACKED
    ),
    **dict.fromkeys(("entropy_from_logits_with_chunking", "entropy_from_logits_chunk_size"), KERNELS),
    **dict.fromkeys(("forward_only", "extra", "extra.*"), "verl sets or ignores it"),
    "grad_offload": GRADIENTS,
}
# Fields of Megatron-Core's DistributedDataParallelConfig that choose when and where gradients and weights travel.
_TRAFFIC = (
    *("overlap_grad_reduce", "overlap_param_gather", "align_param_gather", "use_distributed_optimizer", "bucket_size"),
    *("num_distributed_optimizer_instances", "pad_buckets_for_high_nccl_busbw", "average_in_collective", "nccl_ub"),
    *("use_megatron_fsdp", "use_custom_fsdp", "data_parallel_sharding_strategy", "outer_dp_sharding_strategy"),
    *("suggested_communication_unit_size", "fsdp_double_buffer", "disable_symmetric_registration"),
    *("fsdp_manual_registration", "gradient_reduce_div_fusion", "delay_wgrad_compute"),
)
# Keys of a role that trains nothing.
FROZEN = (
    *SIZES,
    *LAYOUT,
    *("optimizer_offload", "sequence_parallel", "seed", "override_ddp_config.*", "override_mcore_model_config"),
)
_FROZEN_ROUTER = "override_mcore_model_config.moe_config.freeze_moe_router"


def dist_checkpointing(key: str, value: Value, given: Given) -> Translation:
    if is_true(value):
        return no_effect(_READ)(key, value, given)
    return only("false")(key, value, given)


def gradient_traffic(ours: str) -> dict[str, Rule]:
    """Keys below `override_ddp_config`."""
    reduced: Rule = mapped({"true": "float32", "false": "bfloat16"}, f"{ours}.gradient_dtype")
    fields: dict[str, Rule] = {**dict.fromkeys(_TRAFFIC, no_effect(_SHARDED)), "grad_reduce_in_fp32": reduced}

    def whole_mapping(key: str, value: Value, given: Given) -> Translation:
        if not isinstance(value, dict):
            return only("null", "none", "{}")(key, value, given)
        translations = [fields.get(name, only())(f"{key}.{name}", field, given) for name, field in value.items()]
        notes = "; ".join(translation.note for translation in translations if translation.note)
        settings = {ours: field for translation in translations for ours, field in translation.settings.items()}
        return Translation(settings, notes, ignored=not settings)

    name = "override_ddp_config"
    return {name: whole_mapping, **{f"{name}.{field}": rule for field, rule in fields.items()}}


def megatron_rules(role: Role) -> dict[str, Rule]:
    """The keys of one of verl's Megatron sections."""
    ours = f"{role.ours}.sharding"
    rules: dict[str, Rule] = {
        **{key: no_effect(reason) for key, reason in LAYOUT.items()},
        **transformer_rules(),
        **gradient_traffic(ours),
        "tensor_model_parallel_size": split_matrices(role),
        "context_parallel_size": split_tokens(role),
        "pipeline_model_parallel_size": split_layers,
        "virtual_pipeline_model_parallel_size": split_layers,
        "expert_model_parallel_size": split_experts(role),
        "expert_tensor_parallel_size": split_experts(role, "expert_matrices"),
        "sequence_parallel": no_effect("ranks of sharding.context_parallel split the tokens of every activation"),
        "use_dist_checkpointing": dist_checkpointing,
        "router_replay.mode": router_replay(role),
        "override_mcore_model_config": only("null", "none", "{}"),
        _FROZEN_ROUTER: only("false"),
        "dtype": compute_type,
        "seed": same_seed,
        "param_offload": to(f"{ours}.param_offload"),
        "optimizer_offload": to(f"{ours}.optimizer_offload"),
    }
    return {f"{role.theirs}.megatron.{key}": of_engine(role, "megatron", rule) for key, rule in rules.items()}
