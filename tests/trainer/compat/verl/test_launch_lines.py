"""Launch lines and a tuning guide published for verl, unchanged."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.compat.settings import load_config
from trainer.config.tree import Config
from trainer.errors import ConfigError

# Published multi-node recipes for NVIDIA and AMD, under Slurm, a tuning guide, and a GSM8K example.
LAUNCH_LINES = {
    "two nodes": "trainer.n_gpus_per_node=8 trainer.nnodes=2 data.train_batch_size=1024 "
    "actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.gpu_memory_utilization=0.9 "
    "critic.model.fsdp_config.param_offload=True trainer.total_epochs=15",
    "slurm": "data.train_files=../data/gsm8k/train.parquet data.val_files=../data/gsm8k/test.parquet "
    "data.train_batch_size=1024 data.max_prompt_length=256 data.max_response_length=1024 "
    "actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct actor_rollout_ref.model.enable_gradient_checkpointing=False "
    "actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.model.use_remove_padding=True "
    "actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 "
    "actor_rollout_ref.actor.fsdp_config.param_offload=False "
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=False "
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16 "
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.name=vllm "
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.9 actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=16 "
    "actor_rollout_ref.ref.fsdp_config.param_offload=True critic.optim.lr=1e-5 critic.model.use_remove_padding=True "
    "critic.model.path=Qwen/Qwen2-7B-Instruct critic.model.enable_gradient_checkpointing=False "
    "critic.ppo_micro_batch_size_per_gpu=8 critic.model.fsdp_config.param_offload=False "
    "critic.model.fsdp_config.optimizer_offload=False algorithm.kl_ctrl.kl_coef=0.0001 trainer.critic_warmup=0 "
    "trainer.logger=['console','wandb'] trainer.project_name='verl_example' "
    "trainer.experiment_name='Qwen2.5-32B-Instruct_function_rm' trainer.n_gpus_per_node=8 "
    "trainer.val_before_train=False trainer.nnodes=2 trainer.save_freq=-1 trainer.test_freq=10 trainer.total_epochs=15",
    "tuning": "trainer.profiler.enable=True trainer.profiler.dir=/logs/profiler data.train_files=a.parquet "
    "data.custom_cls.path=mapped.py data.custom_cls.name=MappedDataset actor.dtype=bfloat16 "
    "actor.use_flash_attention=True actor.enable_resharding=True actor.resharding_interval=100 "
    "critic.use_gradient_checkpointing=True critic.dtype=bfloat16 critic.grad_accumulation_steps=4 "
    "ddp_config.backend=nccl ddp_config.init_method=env:// ddp_config.timeout=1800 actor.use_reduce_scatter=True "
    "trainer.save_freq=-1",
    "grpo": "algorithm.adv_estimator=grpo data.train_files=$HOME/data/gsm8k/train.parquet "
    "data.val_files=$HOME/data/gsm8k/test.parquet data.train_batch_size=1024 data.max_prompt_length=512 "
    "data.max_response_length=1024 data.filter_overlong_prompts=True data.truncation='error' "
    "actor_rollout_ref.model.path=Qwen/Qwen3-8B actor_rollout_ref.actor.optim.lr=1e-6 "
    "actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32 "
    "actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 "
    "actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.entropy_coeff=0 "
    'actor_rollout_ref.rollout.n=5 algorithm.use_kl_in_reward=False trainer.logger=\'["console","wandb"]\' '
    "+trainer.default_local_dir=checkpoints/grpo trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15",
}


@pytest.mark.parametrize("name", LAUNCH_LINES)
def test_every_published_launch_line_passes_the_check(name: str, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "trainer",
        "config",
        "--check",
        "--config",
        "verl",
        *shlex.split(LAUNCH_LINES[name]),
    ]
    done = subprocess.run(command, cwd=Path(__file__).parents[4], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert Config.model_validate_json(done.stdout)


def test_the_lines_mean_the_same_as_in_verl() -> None:
    config = load_config(["verl"], shlex.split(LAUNCH_LINES["grpo"]))[0]
    assert config.algorithm.advantage == "grpo"
    assert config.algorithm.kl_coefficient == 0
    assert config.actor.kl_loss_coefficient == 0.001
    assert config.actor.kl_loss_estimator == "k3"
    assert config.rollout.samples_per_prompt == 5
    assert config.actor.mini_batch_size == 256 * 5  # verl counts prompts
    assert config.actor.micro_batch_size == 32
    assert config.data.overlong_prompts == "filter"
    assert config.trainer.output_dir == Path("checkpoints/grpo").absolute()
    assert config.trainer.total_epochs == 15
    assert not config.needs_critic
    slurm, notes = load_config(["verl"], shlex.split(LAUNCH_LINES["slurm"]))
    assert (slurm.actor.mini_batch_size, slurm.critic.mini_batch_size) == (256, 256)
    assert slurm.critic.micro_batch_size == 8
    assert slurm.algorithm.kl_coefficient == 0  # use_kl_in_reward is off unless it is set
    assert slurm.trainer.run_id == "Qwen2.5-32B-Instruct_function_rm"
    assert any("kl_coef has no effect" in note for note in notes)
    assert slurm.trainer.loggers == ["wandb"]
    assert slurm.reference.param_offload
    assert not slurm.actor.sharding.param_offload
    two_nodes, _ = load_config(["verl"], shlex.split(LAUNCH_LINES["two nodes"]))
    assert two_nodes.critic.sharding.param_offload
    tuning, _ = load_config(["verl"], shlex.split(LAUNCH_LINES["tuning"]))
    assert tuning.actor.sharding.resharding_interval == 100
    hybrid, _ = load_config([], ["actor_rollout_ref.actor.fsdp_config.fsdp_size=8", "critic.fsdp_config.fsdp_size=-1"])
    assert (hybrid.actor.sharding.shard_size, hybrid.critic.sharding.shard_size) == (8, None)


GUIDE = """
device_mapping:
  actor: {type: tp, devices: ["0,1,2,3"]}
critic: {type: dp, devices: ["node0:0,1;node1:0,1"], model_config: {use_gradient_checkpointing: True}}
reward_model: {type: single, devices: ["0"]}
actor:
  model_config: {dtype: torch.float16, use_flash_attention: True}
  engine_config: {enable_resharding: True, resharding_interval: 100}
  training_config: {grad_accumulation_steps: 4}
trainer:
  ddp_config: {backend: c10d, init_method: "env://", timeout: 1800}
"""


def test_the_files_of_a_tuning_guide_are_read(tmp_path: Path) -> None:
    file = tmp_path / "guide.yaml"
    file.write_text(GUIDE)
    config, _ = load_config([str(file)], [])
    mapping = config.device_mapping
    assert (mapping.actor, mapping.critic, mapping.reward) == ("0,1,2,3", "node0:0,1;node1:0,1", "0")
    assert (config.model.dtype, config.actor.sharding.resharding_interval) == ("float16", 100)
    assert (config.critic.activation_checkpointing, config.trainer.worker_timeout) == (True, 1800)
    with pytest.raises(
        ConfigError, match=r"critic\.model_config\.dtype=torch\.bfloat16 differs from the actor's float16"
    ):
        load_config([str(file)], ["critic.model_config.dtype=torch.bfloat16"])
    assert load_config([], ["critic.model_config.dtype=torch.bfloat16"])[0].model.dtype == "bfloat16"
