"""Keys of verl's sections that are accepted without effect, and those of sections that several roles have.

A key that ends in `.*` stands for any key of a mapping that verl leaves open.
"""

FSDP_KEYS = (
    *("optimizer_offload", "offload_policy", "fsdp_size", "reshard_after_forward", "forward_prefetch", "strategy"),
    *("wrap_policy", "wrap_policy.min_num_params", "wrap_policy.transformer_layer_cls_to_wrap"),
    *("model_dtype", "dtype", "mixed_precision", "mixed_precision.param_dtype", "mixed_precision.reduce_dtype"),
    *("mixed_precision.buffer_dtype", "use_orig_params", "use_torch_compile", "forward_only", "seed"),
    *("entropy_checkpointing", "entropy_from_logits_with_chunking", "full_determinism"),
    "ulysses_sequence_parallel_size",
)
RECOMPUTE_KEYS = tuple(
    f"override_transformer_config.recompute_{name}" for name in ("granularity", "modules", "method", "num_layers")
)
MEGATRON_KEYS = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel"),
    *("optimizer_offload", "grad_offload", "use_distributed_optimizer", "use_dist_checkpointing"),
    *("dist_checkpointing_path", "dist_checkpointing_prefix", "seed", "use_mbridge", "vanilla_mbridge"),
    *("forward_only", "dtype", "use_remove_padding", "extra", "extra.*", *RECOMPUTE_KEYS),
    *("override_ddp_config", "override_ddp_config.*", "override_transformer_config", "override_transformer_config.*"),
    *("override_mcore_model_config", "override_mcore_model_config.*"),
)
LOG_PROB_KEYS = (
    *("log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu"),
    *("log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu"),
)
ENTROPY_KEYS = ("entropy_from_logits_with_chunking", "entropy_checkpointing")
CHECKPOINT_KEYS = ("contents", "save_contents", "load_contents", "async_save", "mbridge_config", "mbridge_config.*")
PROFILER_KEYS = ("tool", "all_ranks", "ranks", "discrete", "save_path", "tool_config", "tool_config.*")
OPTIMIZER_KEYS = (
    *("betas", "clip_grad", "lr_decay_steps", "lr_decay_style", "lr_scheduler_type", "lr_warmup_init"),
    *("lr_warmup_steps", "lr_warmup_steps_ratio", "lr_wsd_decay_steps", "lr_wsd_decay_style", "min_lr"),
    *("min_lr_ratio", "num_cycles", "optimizer", "optimizer_impl", "override_optimizer_config"),
    *("override_optimizer_config.*", "total_training_steps", "use_checkpoint_opt_param_scheduler"),
    *("warmup_style", "weight_decay_incr_style", "zero_indexed_step"),
)
MULTI_TURN_KEYS = (
    *("completion_callback", "format", "interaction_config_path", "max_assistant_turns", "max_parallel_calls"),
    *("max_tool_response_length", "max_turns", "max_user_turns", "num_repeat_rollouts"),
    *("tokenization_sanity_check_mode", "tool_config_path", "tool_response_truncate_side"),
    "use_inference_chat_template",
)
AGENT_KEYS = (
    *("num_workers", "default_agent_loop", "agent_loop_config_path", "agent_loop_manager_class"),
    *("custom_async_server.path", "custom_async_server.name"),
)
REWARD_MODEL_KEYS = (
    *("strategy", "use_dynamic_bsz", "forward_max_token_len_per_gpu", "ulysses_sequence_parallel_size"),
    *("enable_resource_pool", "n_gpus_per_node", "nnodes", "nccl_timeout", "model.external_lib"),
    *("model.trust_remote_code", "model.use_shm", "model.use_remove_padding", "model.use_fused_kernels"),
    *("model.override_config", "model.override_config.*", "load_weight"),
)
