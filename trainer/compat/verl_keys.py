"""One table from verl's settings to rules that translate them into ours.

`translate` turns `actor_rollout_ref.actor.optim.lr=1e-6` into `actor.learning_rate=1e-6`. A key without effect here is
accepted with a note; a value that asks for a missing feature is refused.
"""

import difflib
from collections.abc import Iterable
from fnmatch import fnmatchcase

from trainer.algorithms.registry import ESTIMATORS, POLICY_LOSSES
from trainer.compat.verl_rules import (
    KL_KINDS,
    Given,
    Rule,
    Value,
    checkpoints_to_keep,
    devices,
    filter_overlong,
    fsdp_rules,
    kl_loss_type,
    loggers,
    mapped,
    megatron_rules,
    no_effect,
    no_effects,
    only,
    overlong_rules,
    resume_mode,
    reward_model_alone,
    reward_model_input,
    rollout_is,
    shared_memory,
    strategy,
    switch,
    switched_by,
    to,
    to_responses,
    truncated_ratio,
    truncation,
)
from trainer.compat.verl_sections import (
    AGENT_KEYS,
    CHECKPOINT_KEYS,
    ENTROPY_KEYS,
    FSDP_KEYS,
    LOG_PROB_KEYS,
    MEGATRON_KEYS,
    MULTI_TURN_KEYS,
    OPTIMIZER_KEYS,
    PROFILER_KEYS,
    REWARD_MODEL_KEYS,
)
from trainer.errors import ConfigError

_ACTOR, _ROLLOUT, _REF, _MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref", "model"))
_MODES = {mode: mode for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")}
_ESTIMATORS = {name: row.name for row in ESTIMATORS.values() for name in row.verl}
_POLICY_LOSSES = {name: row.name for row in POLICY_LOSSES.values() for name in row.verl}
_ACTOR_SHARDING = "the reference uses the actor's sharding; see actor.sharding"
_OPTIMIZER = "the optimizer is AdamW with a constant learning rate"
_FORWARD = "actor.micro_batch_size or actor.micro_batch_tokens limits every forward pass of actor and reference"
_CRITIC_FORWARD = "critic.micro_batch_size or critic.micro_batch_tokens limits every forward pass"
_DYNAMIC = "ppo_max_token_len_per_gpu makes micro-batches dynamic"
_PACKED = "rows are always packed without padding"
_KERNELS = "log-probs are always computed in chunks, and layers are compiled on GPUs"
_REWARD_MODEL = "each device holds the whole reward model; reward.model.micro_batch_size limits its forward passes"
_CHECKPOINT = "a checkpoint always holds everything that an exact continuation needs"
_TRACES = "trainer.profiler writes traces"
_SAMPLES = "samples.jsonl and the report hold samples of every step"

# Exact keys are tried first, then patterns in this order. A pattern stands only for keys that verl leaves open.
RULES: dict[str, Rule] = {
    # ---- data
    "data.val_files": to("data.validation_files"),
    "data.truncation": truncation,
    "data.filter_overlong_prompts": filter_overlong,
    "data.filter_overlong_prompts_workers": no_effect("the tokenizer chooses its number of threads"),
    "data.val_batch_size": no_effect("all held-out prompts are sampled in one batch"),
    "data.gen_batch_size": no_effect("each round draws data.train_batch_size prompts"),
    "data.seed": to("trainer.seed"),
    "data.use_shm": shared_memory,
    "data.tokenizer": only("null"),
    "data.reward_fn_key": only("data_source"),
    "data.dataloader_num_workers": no_effect("prompts are tokenised once, at the start"),
    "data.validation_shuffle": no_effect("the order of the held-out prompts does not matter"),
    **no_effects(
        "data",
        ("return_raw_input_ids", "return_raw_chat", "return_full_prompt", "return_multi_modal_inputs"),
        "prompts are sent as tokens",
    ),
    "data.image_key": no_effect("prompts are text"),
    "data.video_key": no_effect("prompts are text"),
    "data.sampler.class_path": only("null"),
    "data.sampler.class_name": only("null"),
    "data.datagen.path": only("null"),
    "data.datagen.name": only("null"),
    "data.trust_remote_code": only("false"),
    # ---- model
    f"{_MODEL}.path": to("model.path"),
    f"{_MODEL}.enable_gradient_checkpointing": to("actor.activation_checkpointing"),
    f"{_MODEL}.use_remove_padding": no_effect(_PACKED),
    f"{_MODEL}.use_fused_kernels": no_effect(_KERNELS),
    f"{_MODEL}.fused_kernel_options.impl_backend": no_effect(_KERNELS),
    f"{_MODEL}.use_liger": no_effect(_KERNELS),
    f"{_MODEL}.use_shm": no_effect("models are read from model.path directly"),
    f"{_MODEL}.enable_activation_offload": no_effect(
        "activations stay on the device; see actor.activation_checkpointing"
    ),
    f"{_MODEL}.lora_rank": to("actor.lora.rank"),
    f"{_MODEL}.lora_alpha": to("actor.lora.alpha"),
    f"{_MODEL}.target_modules": to("actor.lora.target_modules"),
    f"{_MODEL}.exclude_modules": only("null"),
    f"{_MODEL}.lora_adapter_path": only("null"),
    f"{_MODEL}.trust_remote_code": only("false"),
    f"{_MODEL}.external_lib": only("null"),
    f"{_MODEL}.custom_chat_template": only("null"),
    f"{_MODEL}.override_config": only("{}"),
    # ---- actor
    f"{_ACTOR}.strategy": strategy("actor"),
    f"{_ACTOR}.ppo_mini_batch_size": to_responses("actor.mini_batch_size", inherited=("critic.mini_batch_size",)),
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": to("actor.micro_batch_size"),
    f"{_ACTOR}.ppo_micro_batch_size": only("null"),
    f"{_ACTOR}.use_dynamic_bsz": no_effect(_DYNAMIC),
    f"{_ACTOR}.ppo_max_token_len_per_gpu": switched_by(f"{_ACTOR}.use_dynamic_bsz", "actor.micro_batch_tokens"),
    f"{_ACTOR}.ppo_epochs": to("actor.ppo_epochs", inherited=("critic.ppo_epochs",)),
    f"{_ACTOR}.clip_ratio": to("actor.clip_ratio"),
    f"{_ACTOR}.clip_ratio_low": to("actor.clip_ratio_low"),
    f"{_ACTOR}.clip_ratio_high": to("actor.clip_ratio_high"),
    f"{_ACTOR}.clip_ratio_c": to("actor.clip_dual"),
    f"{_ACTOR}.policy_loss.loss_mode": mapped(_POLICY_LOSSES, "actor.policy_loss"),
    f"{_ACTOR}.loss_agg_mode": mapped(_MODES, "actor.loss_aggregation", inherited=("critic.loss_aggregation",)),
    f"{_ACTOR}.entropy_coeff": to("actor.entropy_coefficient"),
    f"{_ACTOR}.use_kl_loss": switch(f"{_ACTOR}.kl_loss_coef", "actor.kl_loss_coefficient", 0.001),
    f"{_ACTOR}.kl_loss_coef": switched_by(f"{_ACTOR}.use_kl_loss", "actor.kl_loss_coefficient"),
    f"{_ACTOR}.kl_loss_type": kl_loss_type,
    f"{_ACTOR}.tis_imp_ratio_cap": truncated_ratio,
    f"{_ACTOR}.grad_clip": to("actor.max_gradient_norm"),
    f"{_ACTOR}.optim.lr": to("actor.learning_rate"),
    f"{_ACTOR}.optim.weight_decay": to("actor.weight_decay"),
    **no_effects(f"{_ACTOR}.optim", OPTIMIZER_KEYS, _OPTIMIZER),
    f"{_ACTOR}.shuffle": only("false"),
    f"{_ACTOR}.ulysses_sequence_parallel_size": only("1"),
    **fsdp_rules(f"{_ACTOR}.fsdp_config", "actor"),
    **megatron_rules(_ACTOR, "actor"),
    f"{_ACTOR}.use_torch_compile": to("actor.compile"),
    **no_effects(_ACTOR, ENTROPY_KEYS, _KERNELS),
    f"{_ACTOR}.use_fused_kernels": no_effect(_KERNELS),
    f"{_ACTOR}.use_remove_padding": no_effect(_PACKED),
    **no_effects(f"{_ACTOR}.checkpoint", CHECKPOINT_KEYS, _CHECKPOINT),
    **no_effects(f"{_ACTOR}.profiler", ("enable", *PROFILER_KEYS), _TRACES),
    # ---- reference
    f"{_REF}.strategy": no_effect("the reference uses the actor's backend; see actor.backend"),
    f"{_REF}.model": only("null"),
    f"{_REF}.ulysses_sequence_parallel_size": only("1"),
    **no_effects(_REF, LOG_PROB_KEYS, _FORWARD),
    **no_effects(f"{_REF}.fsdp_config", FSDP_KEYS, _ACTOR_SHARDING),
    f"{_REF}.fsdp_config.param_offload": to("reference.param_offload"),
    **no_effects(f"{_REF}.megatron", MEGATRON_KEYS, _ACTOR_SHARDING),
    f"{_REF}.megatron.param_offload": to("reference.param_offload"),
    **no_effects(_REF, ENTROPY_KEYS, _KERNELS),
    f"{_REF}.use_torch_compile": no_effect("the reference is compiled if the actor is; see actor.compile"),
    **no_effects(f"{_REF}.profiler", ("enable", *PROFILER_KEYS), _TRACES),
    # ---- rollout
    f"{_ROLLOUT}.name": mapped({"vllm": "vllm", "hf": "transformers"}, "rollout.engine"),
    f"{_ROLLOUT}.mode": no_effect("an engine gets its whole batch at once and schedules it"),
    f"{_ROLLOUT}.n": to("rollout.samples_per_prompt"),
    f"{_ROLLOUT}.temperature": to("rollout.temperature"),
    f"{_ROLLOUT}.top_k": only("-1", "0"),
    f"{_ROLLOUT}.top_p": only("1", "1.0"),
    f"{_ROLLOUT}.do_sample": only("true"),
    f"{_ROLLOUT}.ignore_eos": only("false"),
    f"{_ROLLOUT}.gpu_memory_utilization": to("rollout.gpu_memory_utilization"),
    f"{_ROLLOUT}.enforce_eager": to("rollout.enforce_eager"),
    f"{_ROLLOUT}.max_num_seqs": to("rollout.max_num_seqs"),
    f"{_ROLLOUT}.tensor_model_parallel_size": only("1"),
    f"{_ROLLOUT}.prompt_length": no_effect("see data.max_prompt_length"),
    f"{_ROLLOUT}.response_length": no_effect("see data.max_response_length"),
    f"{_ROLLOUT}.max_model_len": no_effect("it is data.max_prompt_length plus data.max_response_length"),
    f"{_ROLLOUT}.max_num_batched_tokens": no_effect("vLLM chooses it"),
    f"{_ROLLOUT}.dtype": no_effect("see model.dtype"),
    **no_effects(_ROLLOUT, LOG_PROB_KEYS, _FORWARD),
    f"{_ROLLOUT}.calculate_log_probs": no_effect("see rollout.log_probs"),
    f"{_ROLLOUT}.free_cache_engine": no_effect("see rollout.sleep"),
    f"{_ROLLOUT}.multi_stage_wake_up": no_effect("see rollout.sleep"),
    f"{_ROLLOUT}.load_format": no_effect("engines take their weights from the actor"),
    f"{_ROLLOUT}.layered_summon": no_effect("weights are sent in buckets"),
    f"{_ROLLOUT}.update_weights_bucket_megabytes": no_effect("weights are sent in buckets"),
    f"{_ROLLOUT}.enable_chunked_prefill": no_effect("vLLM chooses it"),
    f"{_ROLLOUT}.enable_prefix_caching": no_effect("cached blocks would become stale with every weight update"),
    f"{_ROLLOUT}.disable_log_stats": no_effect("engine statistics are always off"),
    f"{_ROLLOUT}.cudagraph_capture_sizes": no_effect("vLLM chooses them"),
    f"{_ROLLOUT}.engine_kwargs.*": no_effect("settings under rollout configure the engine"),
    f"{_ROLLOUT}.val_kwargs.do_sample": only("false"),
    f"{_ROLLOUT}.val_kwargs.temperature": only("0", "0.0"),
    f"{_ROLLOUT}.val_kwargs.n": only("1"),
    **no_effects(f"{_ROLLOUT}.val_kwargs", ("top_k", "top_p"), "validation samples greedily"),
    f"{_ROLLOUT}.multi_turn.enable": only("false"),
    **no_effects(f"{_ROLLOUT}.multi_turn", MULTI_TURN_KEYS, "see rollout.environment"),
    **no_effects(f"{_ROLLOUT}.agent", AGENT_KEYS, "see rollout.environment"),
    **no_effects(f"{_ROLLOUT}.profiler", ("enable", *PROFILER_KEYS), _TRACES),
    **no_effects(f"{_ROLLOUT}.trace", ("backend", "token2text", "max_samples_per_step_per_worker"), _SAMPLES),
    "actor_rollout_ref.hybrid_engine": only("true"),
    "actor_rollout_ref.nccl_timeout": to("trainer.worker_timeout"),
    # ---- critic
    "critic.strategy": strategy("critic"),
    "critic.enable": no_effect("algorithm.advantage decides whether there is a critic"),
    "critic.rollout_n": no_effect("see rollout.samples_per_prompt"),
    "critic.model.path": to("critic.path"),
    "critic.model.tokenizer_path": no_effect("actor and critic share the actor's tokenizer"),
    "critic.model.enable_gradient_checkpointing": to("critic.activation_checkpointing"),
    "critic.model.use_remove_padding": no_effect(_PACKED),
    **fsdp_rules("critic.model.fsdp_config", "critic"),
    "critic.model.lora_rank": to("critic.lora.rank"),
    "critic.model.lora_alpha": to("critic.lora.alpha"),
    "critic.model.target_modules": to("critic.lora.target_modules"),
    "critic.model.trust_remote_code": only("false"),
    "critic.model.external_lib": only("null"),
    **no_effects(
        "critic.model",
        ("use_shm", "enable_activation_offload", "override_config", "override_config.*"),
        "the critic loads and computes its model like the actor",
    ),
    **fsdp_rules("critic.fsdp_config", "critic"),
    **megatron_rules("critic", "critic"),
    "critic.optim.lr": to("critic.learning_rate"),
    "critic.optim.weight_decay": to("critic.weight_decay"),
    **no_effects("critic.optim", OPTIMIZER_KEYS, _OPTIMIZER),
    "critic.ppo_mini_batch_size": to_responses("critic.mini_batch_size"),
    "critic.ppo_micro_batch_size_per_gpu": to("critic.micro_batch_size"),
    "critic.ppo_micro_batch_size": only("null"),
    "critic.use_dynamic_bsz": no_effect(_DYNAMIC),
    "critic.ppo_max_token_len_per_gpu": switched_by(
        "critic.use_dynamic_bsz", "critic.micro_batch_tokens", inherited=f"{_ACTOR}.use_dynamic_bsz"
    ),
    "critic.forward_micro_batch_size": no_effect(_CRITIC_FORWARD),
    "critic.forward_micro_batch_size_per_gpu": no_effect(_CRITIC_FORWARD),
    "critic.forward_max_token_len_per_gpu": no_effect(_CRITIC_FORWARD),
    "critic.cliprange_value": to("critic.clip_range_value"),
    "critic.loss_agg_mode": mapped(_MODES, "critic.loss_aggregation"),
    "critic.grad_clip": to("critic.max_gradient_norm"),
    "critic.shuffle": only("false"),
    "critic.ulysses_sequence_parallel_size": only("1"),
    **no_effects("critic.checkpoint", CHECKPOINT_KEYS, _CHECKPOINT),
    **no_effects("critic.profiler", ("enable", *PROFILER_KEYS), _TRACES),
    # ---- reward
    "custom_reward_function.path": to("reward.custom_function.path"),
    "custom_reward_function.name": to("reward.custom_function.name"),
    "reward_model.enable": reward_model_alone,
    "reward_model.model.path": switched_by("reward_model.enable", "reward.model.path"),
    "reward_model.model.input_tokenizer": reward_model_input,
    "reward_model.micro_batch_size_per_gpu": to("reward.model.micro_batch_size"),
    "reward_model.max_length": to("reward.model.max_length"),
    "reward_model.micro_batch_size": only("null"),
    "reward_model.reward_manager": mapped({"naive": "gsm8k", "dapo": "gsm8k", "batch": "gsm8k"}, "reward.name"),
    **overlong_rules("reward_model"),
    **overlong_rules("reward_model.reward_kwargs"),
    "reward_model.launch_reward_fn_async": no_effect("rewards are computed in separate processes"),
    **no_effects("reward_model", REWARD_MODEL_KEYS, _REWARD_MODEL),
    **no_effects("reward_model.model.fsdp_config", ("param_offload", *FSDP_KEYS), _REWARD_MODEL),
    **no_effects("reward_model.megatron", ("param_offload", *MEGATRON_KEYS), _REWARD_MODEL),
    **no_effects(
        "reward_model.sandbox_fusion",
        ("url", "max_concurrent", "memory_limit_mb"),
        "reward.custom_function can call a sandbox",
    ),
    **no_effects("reward_model.profiler", ("enable", *PROFILER_KEYS), _TRACES),
    "reward_model.reward_kwargs": no_effect("a rule takes its parameters from settings under reward"),
    "reward_model.reward_kwargs.*": no_effect("a rule takes its parameters from settings under reward"),
    # ---- algorithm
    "algorithm.adv_estimator": mapped(_ESTIMATORS, "algorithm.advantage"),
    "algorithm.norm_adv_by_std_in_grpo": to("algorithm.divide_by_std"),
    "algorithm.use_kl_in_reward": switch("algorithm.kl_ctrl.kl_coef", "algorithm.kl_coefficient", 0.001),
    "algorithm.kl_penalty": mapped(KL_KINDS, "algorithm.kl_estimator"),
    "algorithm.kl_ctrl.type": mapped({"fixed": "fixed", "adaptive": "adaptive"}, "algorithm.kl_control"),
    "algorithm.kl_ctrl.kl_coef": switched_by("algorithm.use_kl_in_reward", "algorithm.kl_coefficient"),
    "algorithm.kl_ctrl.horizon": to("algorithm.kl_horizon"),
    "algorithm.kl_ctrl.target_kl": to("algorithm.kl_target"),
    "algorithm.filter_groups.enable": to("algorithm.dynamic_sampling"),
    "algorithm.filter_groups.max_num_gen_batches": to("algorithm.max_sampling_rounds"),
    "algorithm.filter_groups.metric": no_effect("groups are compared by score"),
    "algorithm.rollout_is": rollout_is,
    "algorithm.rollout_is_threshold": to("algorithm.correction_high"),
    "algorithm.rollout_correction.rollout_is": rollout_is,
    "algorithm.rollout_correction.rollout_is_threshold": to("algorithm.correction_high"),
    "algorithm.use_pf_ppo": only("false"),
    **no_effects("algorithm.pf_ppo", ("reweight_method", "weight_pow"), "prompts are not reweighted"),
    # ---- trainer
    "trainer.total_training_steps": to("trainer.total_steps"),
    "trainer.default_local_dir": to("trainer.output_dir"),
    "trainer.experiment_name": to("trainer.run_id"),
    "trainer.logger": loggers,
    "trainer.resume_mode": resume_mode,
    "trainer.resume_from_path": to("trainer.resume"),
    "trainer.val_before_train": to("trainer.test_before_training"),
    "trainer.val_only": only("false"),
    "trainer.balance_batch": no_effect("ranks always get about the same number of tokens"),
    "trainer.log_val_generations": no_effect(_SAMPLES),
    "trainer.rollout_data_dir": no_effect(_SAMPLES),
    "trainer.validation_data_dir": no_effect(_SAMPLES),
    "trainer.default_hdfs_dir": only("null"),
    "trainer.device": no_effect("the run uses the GPUs that Ray reports"),
    "trainer.ray_wait_register_center_timeout": to("trainer.worker_timeout"),
    "trainer.max_actor_ckpt_to_keep": checkpoints_to_keep,
    "trainer.max_critic_ckpt_to_keep": checkpoints_to_keep,
    "trainer.del_local_ckpt_after_load": no_effect("see trainer.keep_checkpoints"),
    "trainer.esi_redundant_time": no_effect("SIGTERM saves a checkpoint"),
    "trainer.use_legacy_worker_impl": no_effect("there is only one implementation"),
    **no_effects("trainer.profiler", PROFILER_KEYS, _TRACES),
    **no_effects(
        "global_profiler",
        ("tool", "steps", "profile_continuous_steps", "save_path", "global_tool_config", "global_tool_config.*"),
        _TRACES,
    ),
    "ray_kwargs.ray_init.*": no_effect("`launch` starts and sizes Ray"),
    "ray_kwargs.timeline_json_file": no_effect(_TRACES),
    "ray_init.*": no_effect("`launch` starts and sizes Ray"),
    # ---- keys of published tuning guides
    "actor.dtype": to("model.dtype"),
    "critic.dtype": no_effect("model.dtype applies to every role"),
    "actor.use_flash_attention": no_effect("attention always uses the fastest kernel available for packed rows"),
    "actor.enable_resharding": to("actor.sharding.reshard_after_forward"),
    "actor.resharding_interval": to("actor.sharding.resharding_interval"),
    "actor.use_reduce_scatter": no_effect("gradients always use reduce-scatter"),
    "critic.use_gradient_checkpointing": to("critic.activation_checkpointing"),
    "critic.grad_accumulation_steps": no_effect(
        "critic.micro_batch_size decides how many passes an optimizer step takes"
    ),
    "critic.use_torch_compile": to("critic.compile"),
    "ddp_config.timeout": to("trainer.worker_timeout"),
    "ddp_config.backend": no_effect("the backend is NCCL on GPUs and gloo on CPU"),
    "ddp_config.init_method": no_effect("ranks find each other through Ray"),
    **no_effects(
        "device_mapping",
        ("actor.type", "critic.type", "reference.type", "reward.type", "rollout.type"),
        "weights are always sharded over the devices of a role",
    ),
    "device_mapping.actor.devices": devices,
    "device_mapping.critic.devices": devices,
    "device_mapping.reward.devices": devices,
    "device_mapping.rollout.devices": devices,
    "device_mapping.reference.devices": devices,
    "data.use_mmap": no_effect("prompts are always memory-mapped"),
}


def translate(given: Given, known: Iterable[str]) -> tuple[dict[str, Value], list[str]]:
    """Our settings for everything given, and notes for the user. The last value of a setting counts.

    Keys in `known` and unknown ones stay. Raises ConfigError for a value that asks for a missing feature, and for a
    misspelt key.
    """
    known = set(known)
    settings: dict[str, Value] = {}
    inherited: dict[str, Value] = {}
    notes: list[str] = []
    for key, value in given.items():
        rule = None if key in known else _rule(key)
        if rule is None:
            settings[key] = value
            continue
        translation = rule(key, value, given)
        settings |= translation.settings
        inherited |= translation.inherited
        if translation.note:
            notes.append(translation.note)
    return inherited | settings, notes


def _rule(key: str) -> Rule | None:
    """The rule of a key: its own, or the first pattern that matches. Raises ConfigError for a near miss of a key."""
    if key in RULES:
        return RULES[key]
    found = next((rule for pattern, rule in RULES.items() if "*" in pattern and fnmatchcase(key, pattern)), None)
    if found is not None:
        section, _, leaf = key.rpartition(".")
        siblings = [name.rpartition(".")[2] for name in RULES if name.rpartition(".")[0] == section]
        near = difflib.get_close_matches(leaf, [name for name in siblings if "*" not in name], n=1, cutoff=0.85)
        if near:
            raise ConfigError(f"{key}: there is no such setting", hint=f"did you mean {section}.{near[0]}=VALUE?")
    return found
