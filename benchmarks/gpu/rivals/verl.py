"""verl's PPO and GRPO on the job of `benchmarks.gpu.common.write_job`, tuned as its experts would.

FSDP2, dynamic batches, rows without padding, fused kernels for the head, passes without gradients in batches twice as
large, one optimizer step of each network, and vLLM on the same GPUs without its own log-probs, which verl computes
again. Needs verl 0.9.1 and flash-attn, or something with flash-attn's interface.

`asynchronous` is verl's fully asynchronous trainer on two GPUs, one that trains and one that samples, whose log-probs
are the old ones. New weights go to the engine after every step, which continues its responses; at most `--rival-ahead`
batches wait or are under way besides the one in training. Also needs CuPy.
"""

import argparse
import re
import sys
from pathlib import Path

# The line that verl's console logger writes at the end of a step, and the numbers in it.
STEP = re.compile(r"step:\d+ - ")
NUMBER = re.compile(r"([\w/]+):(?:np\.float64\()?(-?[\d.]+(?:e-?\d+)?)")
TOKENS = "perf/total_num_tokens"
MAX_NUM_SEQS = 1024

# In the order of a step; verl's name for each.
PHASES = {
    "generate": "gen",
    "reward": "reward",
    "old_log_prob": "old_log_prob",
    "reference": "ref",
    "values": "values",
    "advantages": "adv",
    "update_critic": "update_critic",
    "update_actor": "update_actor",
    "sync_weights": "update_weights",
    "step": "step",
}


def command(job: Path, options: argparse.Namespace) -> list[str]:
    """The command that runs verl; `options` are those of `benchmarks.gpu.step`."""
    model, tokens = job / "model", options.rival_tokens
    data = {
        "train_files": job / "train.parquet",
        "val_files": job / "validation.parquet",
        "train_batch_size": options.batch,
        "max_prompt_length": options.prompt,
        "max_response_length": options.response,
        "filter_overlong_prompts": False,
        "truncation": "right",
    }
    policy = {
        "model.path": model,
        "model.use_remove_padding": True,
        "model.enable_gradient_checkpointing": not options.rival_keeps,
        "model.use_fused_kernels": True,
        "model.fused_kernel_options.impl_backend": "triton",
        "actor.strategy": "fsdp2",
        "actor.ppo_mini_batch_size": options.batch,
        "actor.use_dynamic_bsz": True,
        "actor.ppo_max_token_len_per_gpu": tokens,
        "ref.log_prob_use_dynamic_bsz": True,
        "ref.log_prob_max_token_len_per_gpu": 2 * tokens,
        "rollout.log_prob_use_dynamic_bsz": True,
        "rollout.log_prob_max_token_len_per_gpu": 2 * tokens,
        "rollout.name": "vllm",
        "rollout.n": options.samples,
        "rollout.tensor_model_parallel_size": 1,
        "rollout.gpu_memory_utilization": 0.5,
        "rollout.max_num_seqs": MAX_NUM_SEQS,
        "rollout.ignore_eos": not options.varies,
        "rollout.calculate_log_probs": False,
    }
    trainer = {
        "n_gpus_per_node": options.gpus,
        "nnodes": 1,
        "logger": "[console]",
        "total_training_steps": options.steps,
        "val_before_train": False,
        "test_freq": -1,
        "save_freq": -1,
    }
    settings = {
        **(_ppo(job, options) if options.algorithm == "ppo" else _grpo()),
        "reward.custom_reward_function.path": job / "reward.py",
        **{f"data.{key}": value for key, value in data.items()},
        **{f"actor_rollout_ref.{key}": value for key, value in policy.items()},
        **{f"trainer.{key}": value for key, value in trainer.items()},
    }
    return [sys.executable, "-m", "verl.trainer.main_ppo", *(f"{key}={value}" for key, value in settings.items())]


def asynchronous(job: Path, options: argparse.Namespace) -> list[str]:
    """The command of the fully asynchronous trainer; of two settings with the same key, Hydra takes the later one."""
    module = "verl.experimental.fully_async_policy.fully_async_main"
    settings = {
        "data.train_batch_size": 0,
        "data.gen_batch_size": 1,
        "actor_rollout_ref.hybrid_engine": False,
        "actor_rollout_ref.rollout.calculate_log_probs": True,
        "actor_rollout_ref.rollout.gpu_memory_utilization": 0.8,
        "trainer.n_gpus_per_node": 1,
        "rollout.nnodes": 1,
        "rollout.n_gpus_per_node": 1,
        "rollout.n": options.samples,
        "rollout.total_rollout_steps": options.batch * options.steps,
        "async_training.staleness_threshold": options.rival_ahead,
        "async_training.trigger_parameter_sync_step": 1,
        "async_training.require_batches": 1,
        "async_training.partial_rollout": True,
        # Its server answers this many calls at a time. Behind more, the call that pauses it for new weights would wait.
        "async_training.concurrent_samples_per_replica": MAX_NUM_SEQS // options.samples,
    }
    python, option, _, *given = command(job, options)
    return [python, option, module, *given, *(f"{key}={value}" for key, value in settings.items())]


def _ppo(job: Path, options: argparse.Namespace) -> dict[str, object]:
    """A critic, and the KL to the reference in the reward."""
    return {
        "algorithm.adv_estimator": "gae",
        "algorithm.use_kl_in_reward": True,
        "critic.model.path": job / "model",
        "critic.strategy": "fsdp2",
        "critic.model.use_remove_padding": True,
        "critic.model.enable_gradient_checkpointing": not options.rival_keeps,
        "critic.use_dynamic_bsz": True,
        "critic.ppo_max_token_len_per_gpu": options.rival_tokens,
        "critic.forward_max_token_len_per_gpu": 2 * options.rival_tokens,
    }


def _grpo() -> dict[str, object]:
    """No critic, and the KL to the reference in the loss."""
    return {
        "algorithm.adv_estimator": "grpo",
        "algorithm.use_kl_in_reward": False,
        "actor_rollout_ref.actor.use_kl_loss": True,
        "actor_rollout_ref.actor.kl_loss_coef": 0.001,
        "actor_rollout_ref.actor.kl_loss_type": "low_var_kl",
    }
