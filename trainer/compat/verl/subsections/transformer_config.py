"""Keys below `megatron.override_transformer_config`: fields of Megatron-Core's TransformerConfig.

Those that choose kernels, memory or placement have no effect on the result. Those that change what a layer computes
must agree with what happens here. Every other field is refused.
"""

from trainer.compat.verl.rules import Given, Rule, Translation, Value, no_effect, only, unsupported, word
from trainer.errors import ConfigError

NAME = "override_transformer_config"

_KERNELS = (
    *("apply_rope_fusion", "attention_backend", "bias_activation_fusion", "bias_dropout_fusion", "persist_layer_norm"),
    *("gradient_accumulation_fusion", "masked_softmax_fusion", "use_flash_attn", "use_fused_rmsnorm"),
    *("use_fused_swiglu", "use_fused_rotary_pos_emb", "use_fused_mhc", "use_naive_l2norm", "apply_dsa_kernel_fusion"),
    *("deallocate_pipeline_outputs", "use_distributed_optimizer", "sequence_parallel", "cross_entropy_loss_fusion"),
    *("cross_entropy_fusion_impl", "fused_single_qkv_rope", "memory_efficient_layer_norm", "variable_seq_lengths"),
    *("overlap_p2p_comm", "batch_p2p_comm", "tp_comm_overlap", "cp_comm_type", "delay_wgrad_compute"),
    *("defer_embedding_wgrad_compute", "enable_cuda_graph", "external_cuda_graph", "cuda_graph_impl"),
    *("cuda_graph_scope", "cuda_graph_warmup_steps"),
)
_STAGES = (
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    *("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "pipeline_model_parallel_layout"),
)
_DISPATCH = (
    *("moe_enable_deepep", "moe_grouped_gemm", "moe_permute_fusion", "moe_shared_expert_overlap"),
    *("moe_token_dispatcher_type", "moe_flex_dispatcher_backend", "moe_deepep_num_sms", "moe_hybridep_num_sms"),
    *("moe_router_fusion", "overlap_moe_expert_parallel_comm"),
)
_RECOMPUTE = (
    *(f"recompute_{name}" for name in ("granularity", "modules", "method", "num_layers")),
    *("distribute_saved_activations", "moe_layer_recompute", "fine_grained_activation_offloading", "offload_modules"),
    "min_offloaded_tensor_size",
)
_SAME: dict[str, tuple[str, ...]] = {
    "attention_dropout": ("0", "0.0"),
    "hidden_dropout": ("0", "0.0"),
    "fp8": ("false", "null"),
    "fp8_recipe": ("null",),
    "context_parallel_size": ("1",),
    "context_parallel_algo": ("null",),
    "tensor_model_parallel_size": ("1",),
    "use_arbitrary_attention_mask": ("false",),
    "moe_router_bias_update_rate": ("0", "0.0"),
    "moe_router_enable_expert_bias": ("false",),
    "moe_router_load_balancing_type": ("none", "null"),
}


def of_the_model(key: str, value: Value, _given: Given) -> Translation:
    if word(value) == "null":
        return Translation({})
    raise ConfigError(
        f"{key}={value} is not supported here: the model's config.json decides what its layers compute",
        hint="leave it out, or change the model's config.json",
    )


def balance(ours: str) -> Rule:
    """The weight of one of Megatron-Core's losses that balance experts; ours is another mean."""

    def rule(key: str, value: Value, _given: Given) -> Translation:
        if word(value) in ("0", "0.0", "null"):
            return Translation({})
        raise ConfigError(
            f"{key}={value} is not supported here: Megatron's loss is a mean over the tokens of a micro-batch, that of "
            f"{ours} one over responses",
            hint=f"leave it out, or set {ours}",
        )

    return rule


def router_dtype(key: str, value: Value, given: Given) -> Translation:
    """Megatron-Core's type of the routers' products. A reference computes as the actor does."""
    role = "critic" if key.startswith("critic.") else "actor"
    of_actor = key.replace("actor_rollout_ref.ref.", "actor_rollout_ref.actor.", 1)
    if word(value) == "null" or (key != of_actor and word(value) == word(given.get(of_actor))):
        return Translation({})
    if word(value) != "fp32" or key != of_actor:
        raise unsupported(key, value, ("null", "fp32"))
    return Translation({f"{role}.router_dtype": "float32"}, "the weights of routers are not rounded to bfloat16 either")


def whole(key: str, value: Value, given: Given) -> Translation:
    """The fields as one mapping."""
    if not isinstance(value, dict):
        return only("null", "none", "{}")(key, value, given)
    fields = {f"{key}.{name}": field for name, field in value.items()}
    translations = [
        FIELDS.get(name, of_the_model)(f"{key}.{name}", field, {**given, **fields}) for name, field in value.items()
    ]
    notes = "; ".join(translation.note for translation in translations if translation.note)
    merged = {ours: mapped for translation in translations for ours, mapped in translation.settings.items()}
    return Translation(merged, notes, ignored=not merged)


FIELDS: dict[str, Rule] = {
    **dict.fromkeys(_KERNELS, no_effect("the trainer chooses its kernels, which may round differently")),
    **dict.fromkeys(_STAGES, no_effect("there are no pipeline stages")),
    **dict.fromkeys(
        _DISPATCH, no_effect("it only says how tokens reach experts: all of them do, and grouped products compute them")
    ),
    **dict.fromkeys(_RECOMPUTE, no_effect("see actor.activation_checkpointing")),
    **{name: only(*accepted) for name, accepted in _SAME.items()},
    "moe_router_dtype": router_dtype,
    "moe_aux_loss_coeff": balance("actor.router_aux_loss"),
    "moe_z_loss_coeff": balance("actor.router_z_loss"),
}


def transformer_rules() -> dict[str, Rule]:
    """The rules by key below `megatron`. The last one refuses fields that no other names."""
    return {NAME: whole, **{f"{NAME}.{name}": rule for name, rule in FIELDS.items()}, f"{NAME}.*": of_the_model}
