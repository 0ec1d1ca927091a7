"""verl's settings as ours: one table from their keys to rules.

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
    only,
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
from trainer.errors import ConfigError

_ACTOR, _ROLLOUT, _REF, _MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref", "model"))
_MODES = {mode: mode for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")}
_ESTIMATORS = {name: row.name for row in ESTIMATORS.values() for name in row.verl}
_POLICY_LOSSES = {name: row.name for row in POLICY_LOSSES.values() for name in row.verl}
_BY_ACTOR = "the reference is sharded like the actor, see actor.sharding"
_WARM_UP = "the learning rate is constant"
_ONE_FORWARD = "actor.micro_batch_size or actor.micro_batch_tokens bounds every forward pass of actor and reference"
_PACKED = "rows are always packed without padding"
_KERNELS = "log-probs are always computed in chunks, and layers compiled on GPUs"
_WHOLE = "a reward model is whole on each device; reward.model.micro_batch_size bounds its forward passes"
_TRACES = "phase times are always recorded; traces are not"

# Patterns are tried after exact keys, in this order.
RULES: dict[str, Rule] = {
    # ---- data
    "data.val_files": to("data.validation_files"),
    "data.truncation": truncation,
    "data.filter_overlong_prompts": filter_overlong,
    "data.filter_overlong_prompts_workers": no_effect("prompts are tokenised by the tokenizer's own threads"),
    "data.val_batch_size": no_effect("all held-out prompts are answered at once"),
    "data.gen_batch_size": no_effect("each round draws data.train_batch_size prompts"),
    "data.seed": to("trainer.seed"),
    "data.use_shm": shared_memory,
    "data.tokenizer": only("null"),
    "data.reward_fn_key": only("data_source"),
    "data.dataloader_num_workers": no_effect("the prompts are tokenised once, at the start"),
    "data.validation_shuffle": no_effect("the order of the held-out prompts does not matter"),
    "data.return_*": no_effect("prompts travel as tokens"),
    "data.image_key": no_effect("prompts are text"),
    "data.video_key": no_effect("prompts are text"),
    "data.sampler.*": only("null"),
    "data.datagen.*": only("null"),
    "data.trust_remote_code": only("false"),
    # ---- model
    f"{_MODEL}.path": to("model.path"),
    f"{_MODEL}.enable_gradient_checkpointing": to("actor.activation_checkpointing"),
    f"{_MODEL}.use_remove_padding": no_effect(_PACKED),
    f"{_MODEL}.use_fused_kernels": no_effect(_KERNELS),
    f"{_MODEL}.fused_kernel_options.*": no_effect(_KERNELS),
    f"{_MODEL}.use_liger": no_effect(_KERNELS),
    f"{_MODEL}.use_shm": no_effect("models are read where they are"),
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
    f"{_ACTOR}.use_dynamic_bsz": no_effect("ppo_max_token_len_per_gpu is what makes micro-batches dynamic"),
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
    f"{_ACTOR}.optim.*": no_effect(_WARM_UP),
    f"{_ACTOR}.shuffle": only("false"),
    f"{_ACTOR}.ulysses_sequence_parallel_size": only("1"),
    **fsdp_rules(f"{_ACTOR}.fsdp_config", "actor"),
    **megatron_rules(_ACTOR, "actor"),
    f"{_ACTOR}.use_torch_compile": to("actor.compile"),
    f"{_ACTOR}.entropy_*": no_effect(_KERNELS),
    f"{_ACTOR}.use_fused_kernels": no_effect(_KERNELS),
    f"{_ACTOR}.use_remove_padding": no_effect(_PACKED),
    f"{_ACTOR}.checkpoint.*": no_effect("a checkpoint always holds what an exact continuation needs"),
    f"{_ACTOR}.profiler.*": no_effect(_TRACES),
    # ---- reference
    f"{_REF}.strategy": no_effect("the reference is computed like the actor, see actor.backend"),
    f"{_REF}.model": only("null"),
    f"{_REF}.ulysses_sequence_parallel_size": only("1"),
    f"{_REF}.log_prob_*": no_effect(_ONE_FORWARD),
    f"{_REF}.fsdp_config.param_offload": to("reference.param_offload"),
    f"{_REF}.fsdp_config.*": no_effect(_BY_ACTOR),
    f"{_REF}.megatron.param_offload": to("reference.param_offload"),
    f"{_REF}.megatron.*": no_effect(_BY_ACTOR),
    f"{_REF}.entropy_*": no_effect(_KERNELS),
    f"{_REF}.use_torch_compile": no_effect("the reference is compiled like the actor, see actor.compile"),
    f"{_REF}.profiler.*": no_effect(_TRACES),
    # ---- rollout
    f"{_ROLLOUT}.name": mapped({"vllm": "vllm", "hf": "transformers"}, "rollout.engine"),
    f"{_ROLLOUT}.mode": no_effect("engines are always given a whole batch and schedule it themselves"),
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
    f"{_ROLLOUT}.max_model_len": no_effect("it is the longest prompt and response together"),
    f"{_ROLLOUT}.max_num_batched_tokens": no_effect("vLLM chooses it"),
    f"{_ROLLOUT}.dtype": no_effect("see model.dtype"),
    f"{_ROLLOUT}.log_prob_*": no_effect(_ONE_FORWARD),
    f"{_ROLLOUT}.calculate_log_probs": no_effect("engines always return log-probs"),
    f"{_ROLLOUT}.free_cache_engine": no_effect("an engine gives back its memory by itself"),
    f"{_ROLLOUT}.multi_stage_wake_up": no_effect("an engine gives back its memory by itself"),
    f"{_ROLLOUT}.load_format": no_effect("the weights come from the actor"),
    f"{_ROLLOUT}.layered_summon": no_effect("weights are sent in buckets"),
    f"{_ROLLOUT}.update_weights_bucket_megabytes": no_effect("weights are sent in buckets"),
    f"{_ROLLOUT}.enable_chunked_prefill": no_effect("vLLM chooses it"),
    f"{_ROLLOUT}.enable_prefix_caching": no_effect("cached blocks would outlive the weights that made them"),
    f"{_ROLLOUT}.disable_log_stats": no_effect("the engine's statistics are off"),
    f"{_ROLLOUT}.cudagraph_capture_sizes": no_effect("vLLM chooses them"),
    f"{_ROLLOUT}.engine_kwargs.*": no_effect("the engine is set up by rollout.*"),
    f"{_ROLLOUT}.val_kwargs.do_sample": only("false"),
    f"{_ROLLOUT}.val_kwargs.temperature": only("0", "0.0"),
    f"{_ROLLOUT}.val_kwargs.n": only("1"),
    f"{_ROLLOUT}.val_kwargs.*": no_effect("held-out prompts are answered greedily"),
    f"{_ROLLOUT}.multi_turn.enable": only("false"),
    f"{_ROLLOUT}.multi_turn.*": no_effect("see rollout.environment"),
    f"{_ROLLOUT}.agent.*": no_effect("see rollout.environment"),
    f"{_ROLLOUT}.profiler.*": no_effect(_TRACES),
    f"{_ROLLOUT}.trace.*": no_effect(_TRACES),
    "actor_rollout_ref.hybrid_engine": only("true"),
    "actor_rollout_ref.nccl_timeout": to("trainer.worker_timeout"),
    # ---- critic
    "critic.strategy": strategy("critic"),
    "critic.enable": no_effect("algorithm.advantage decides whether there is a critic"),
    "critic.rollout_n": no_effect("see rollout.samples_per_prompt"),
    "critic.model.path": to("critic.path"),
    "critic.model.tokenizer_path": no_effect("the actor's tokenizer serves both"),
    "critic.model.enable_gradient_checkpointing": to("critic.activation_checkpointing"),
    "critic.model.use_remove_padding": no_effect(_PACKED),
    **fsdp_rules("critic.model.fsdp_config", "critic"),
    "critic.model.lora_rank": to("critic.lora.rank"),
    "critic.model.lora_alpha": to("critic.lora.alpha"),
    "critic.model.target_modules": to("critic.lora.target_modules"),
    "critic.model.trust_remote_code": only("false"),
    "critic.model.external_lib": only("null"),
    "critic.model.*": no_effect("all weights are trained"),
    **fsdp_rules("critic.fsdp_config", "critic"),
    **megatron_rules("critic", "critic"),
    "critic.optim.lr": to("critic.learning_rate"),
    "critic.optim.weight_decay": to("critic.weight_decay"),
    "critic.optim.*": no_effect(_WARM_UP),
    "critic.ppo_mini_batch_size": to_responses("critic.mini_batch_size"),
    "critic.ppo_micro_batch_size_per_gpu": to("critic.micro_batch_size"),
    "critic.ppo_micro_batch_size": only("null"),
    "critic.use_dynamic_bsz": no_effect("ppo_max_token_len_per_gpu is what makes micro-batches dynamic"),
    "critic.ppo_max_token_len_per_gpu": switched_by(
        "critic.use_dynamic_bsz", "critic.micro_batch_tokens", inherited=f"{_ACTOR}.use_dynamic_bsz"
    ),
    "critic.forward_*": no_effect("critic.micro_batch_size or critic.micro_batch_tokens bounds every forward pass"),
    "critic.cliprange_value": to("critic.clip_range_value"),
    "critic.loss_agg_mode": mapped(_MODES, "critic.loss_aggregation"),
    "critic.grad_clip": to("critic.max_gradient_norm"),
    "critic.shuffle": only("false"),
    "critic.ulysses_sequence_parallel_size": only("1"),
    "critic.checkpoint.*": no_effect("a checkpoint always holds what an exact continuation needs"),
    "critic.profiler.*": no_effect(_TRACES),
    # ---- reward
    "custom_reward_function.path": to("reward.custom_function.path"),
    "custom_reward_function.name": to("reward.custom_function.name"),
    "reward_model.enable": reward_model_alone,
    "reward_model.model.path": switched_by("reward_model.enable", "reward.model.path"),
    "reward_model.model.input_tokenizer": reward_model_input,
    "reward_model.model.*": no_effect(_WHOLE),
    "reward_model.micro_batch_size_per_gpu": to("reward.model.micro_batch_size"),
    "reward_model.max_length": to("reward.model.max_length"),
    "reward_model.micro_batch_size": only("null"),
    "reward_model.reward_manager": mapped({"naive": "gsm8k", "dapo": "gsm8k", "batch": "gsm8k"}, "reward.name"),
    "reward_model.*overlong_buffer*.enable": only("true", "false"),
    "reward_model.*overlong_buffer*.len": to("reward.overlong_buffer"),
    "reward_model.*overlong_buffer*.penalty_factor": to("reward.overlong_penalty"),
    "reward_model.*overlong_buffer*.log": no_effect("the lengths are logged"),
    "reward_model.*max_resp_len": no_effect("see data.max_response_length"),
    "reward_model.launch_reward_fn_async": no_effect("rewards are computed in processes of their own"),
    "reward_model.*": no_effect(_WHOLE),
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
    "algorithm.filter_groups.metric": no_effect("the score decides"),
    "algorithm.rollout_is": rollout_is,
    "algorithm.rollout_is_threshold": to("algorithm.correction_high"),
    "algorithm.rollout_correction.rollout_is": rollout_is,
    "algorithm.rollout_correction.rollout_is_threshold": to("algorithm.correction_high"),
    "algorithm.use_pf_ppo": only("false"),
    "algorithm.pf_ppo.*": no_effect("prompts are not reweighted"),
    # ---- trainer
    "trainer.total_training_steps": to("trainer.total_steps"),
    "trainer.default_local_dir": to("trainer.output_dir"),
    "trainer.experiment_name": to("trainer.run_id"),
    "trainer.logger": loggers,
    "trainer.resume_mode": resume_mode,
    "trainer.resume_from_path": to("trainer.resume"),
    "trainer.val_before_train": to("trainer.test_before_training"),
    "trainer.val_only": only("false"),
    "trainer.balance_batch": no_effect("rows are always balanced over the ranks by their tokens"),
    "trainer.log_val_generations": no_effect("samples of every step are in samples.jsonl and in the report"),
    "trainer.rollout_data_dir": no_effect("samples of every step are in samples.jsonl"),
    "trainer.validation_data_dir": no_effect("samples of every step are in samples.jsonl"),
    "trainer.default_hdfs_dir": only("null"),
    "trainer.device": no_effect("GPUs are used where Ray reports them"),
    "trainer.ray_wait_register_center_timeout": to("trainer.worker_timeout"),
    "trainer.max_actor_ckpt_to_keep": checkpoints_to_keep,
    "trainer.max_critic_ckpt_to_keep": checkpoints_to_keep,
    "trainer.del_local_ckpt_after_load": no_effect("trainer.keep_checkpoints decides how many are kept"),
    "trainer.esi_redundant_time": no_effect("SIGTERM saves a checkpoint"),
    "trainer.use_legacy_worker_impl": no_effect("there is one implementation"),
    "trainer.profiler.*": no_effect("see trainer.profiler"),
    "global_profiler.*": no_effect(_TRACES),
    "ray_kwargs.*": no_effect("`launch` starts Ray and sizes it"),
    "ray_init.*": no_effect("`launch` starts Ray and sizes it"),
    # ---- keys of published tuning guides
    "actor.dtype": to("model.dtype"),
    "critic.dtype": no_effect("model.dtype is that of every role"),
    "actor.use_flash_attention": no_effect("attention over packed rows always takes the fastest kernel there is"),
    "actor.enable_resharding": to("actor.sharding.reshard_after_forward"),
    "actor.resharding_interval": to("actor.sharding.resharding_interval"),
    "actor.use_reduce_scatter": no_effect("gradients are always reduced and scattered in one"),
    "critic.use_gradient_checkpointing": to("critic.activation_checkpointing"),
    "critic.grad_accumulation_steps": no_effect(
        "critic.micro_batch_size decides how many passes make an optimizer step"
    ),
    "critic.use_torch_compile": to("critic.compile"),
    "ddp_config.timeout": to("trainer.worker_timeout"),
    "ddp_config.*": no_effect("the ranks find each other through Ray"),
    "device_mapping.*.type": no_effect("weights are always sharded over the devices of a role"),
    "device_mapping.actor.devices": devices,
    "device_mapping.critic.devices": devices,
    "device_mapping.reward.devices": devices,
    "device_mapping.rollout.devices": devices,
    "device_mapping.reference.devices": devices,
    "data.use_mmap": no_effect("prompts are always memory-mapped"),
}


def translate(given: Given, known: Iterable[str]) -> tuple[dict[str, Value], list[str]]:
    """Our settings for everything given, and notes for the user. The last value given for a setting counts.

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
