"""verl's PPO on the job of `benchmarks.gpu.common.write_job`, as its documentation advises for speed.

Dynamic batches, rows without padding, fused kernels for the head, activations recomputed, one optimizer step of each
network, vLLM on the same GPUs. Needs verl 0.9.1 and flash-attn, or something with flash-attn's interface.
"""

import argparse
import re
import sys
from pathlib import Path

# The line that verl's console logger writes at the end of a step, and the numbers in it.
STEP = re.compile(r"step:\d+ - ")
NUMBER = re.compile(r"([\w/]+):(?:np\.float64\()?(-?[\d.]+(?:e-?\d+)?)")

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
    """The command that runs verl; `options` are those of `benchmarks.gpu.ppo_step`."""
    model, tokens = job / "model", options.verl_tokens
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
        "model.enable_gradient_checkpointing": True,
        "model.use_fused_kernels": True,
        "model.fused_kernel_options.impl_backend": "triton",
        "actor.ppo_mini_batch_size": options.batch,
        "actor.use_dynamic_bsz": True,
        "actor.ppo_max_token_len_per_gpu": tokens,
        "ref.log_prob_use_dynamic_bsz": True,
        "rollout.log_prob_use_dynamic_bsz": True,
        "rollout.name": "vllm",
        "rollout.tensor_model_parallel_size": 1,
        "rollout.gpu_memory_utilization": 0.6,
        "rollout.max_num_seqs": 1024,
        "rollout.ignore_eos": True,
    }
    critic = {
        "model.path": model,
        "model.use_remove_padding": True,
        "use_dynamic_bsz": True,
        "ppo_max_token_len_per_gpu": tokens,
        "forward_max_token_len_per_gpu": tokens,
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
        "algorithm.adv_estimator": "gae",
        "algorithm.use_kl_in_reward": True,
        "reward.custom_reward_function.path": job / "reward.py",
        **{f"data.{key}": value for key, value in data.items()},
        **{f"actor_rollout_ref.{key}": value for key, value in policy.items()},
        **{f"critic.{key}": value for key, value in critic.items()},
        **{f"trainer.{key}": value for key, value in trainer.items()},
    }
    return [sys.executable, "-m", "verl.trainer.main_ppo", *(f"{key}={value}" for key, value in settings.items())]
