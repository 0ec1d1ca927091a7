"""Launch lines published for verl, unchanged, and the translation of each kind of key."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.compat.verl.rules import Value
from trainer.compat.verl.translate import RULES
from trainer.config.overrides import load_config, settings
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
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False)
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


SWITCHES_ON: dict[str, Value] = {
    "actor_rollout_ref.actor.ppo_mini_batch_size": "1",
    "actor_rollout_ref.actor.strategy": "megatron",
    "actor_rollout_ref.actor.use_dynamic_bsz": "true",
    "actor_rollout_ref.actor.use_kl_loss": "true",
    "algorithm.use_kl_in_reward": "true",
    "critic.strategy": "megatron",
    "critic.use_dynamic_bsz": "true",
    "reward_model.enable": "true",
    "trainer.experiment_name": "mine",
    "trainer.mode": "asynchronous",
}


@pytest.mark.parametrize("pattern", RULES)
def test_every_rule_produces_existing_settings(pattern: str) -> None:
    """Each rule is tried with values of every kind, and with every switch on that other keys depend on."""
    known = {setting.key for setting in settings(Config)}
    tried = ("true", "1", "null", "false", "{}", "token-mean", "vanilla", "gae", "vllm", "fsdp", "fixed", "k3", "naive")
    tried = (
        *tried,
        "error",
        "token",
        "auto",
        "data_source",
        "0",
        "-1",
        "console",
        "adamw",
        "torch.optim",
        "constant",
        "tool_agent",
        "sync",
    )
    translations = []
    for value in tried:
        try:
            translations.append(RULES[pattern](pattern, value, SWITCHES_ON | {pattern: value}))
        except ConfigError:
            continue
    assert translations, "no value is accepted"
    assert {key for found in translations for key in (*found.settings, *found.inherited, *found.computed)} <= known


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("actor_rollout_ref.rollout.name=sglang", "supported: vllm"),
        ("actor_rollout_ref.actor.strategy=veomni", "supported: fsdp, fsdp2, megatron"),
        ("algorithm.adv_estimator=vtrace", "supported: gae, gdpo, gpg, grpo"),
        ("actor_rollout_ref.rollout.repetition_penalty=1.1", "supported: 1"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=gvpo", "supported: cispo, clip_cov"),
    ],
)
def test_a_value_that_asks_for_a_missing_feature_is_refused(argument: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([], [argument])
    assert f"{argument} is not supported here" in str(caught.value)
    assert words in caught.value.hint


def test_megatron_settings_have_an_effect_with_the_megatron_strategy() -> None:
    section = "actor_rollout_ref.actor.megatron"
    sizes = [f"{section}.tensor_model_parallel_size=4", f"{section}.sequence_parallel=False"]
    line = ["actor_rollout_ref.actor.strategy=megatron", "critic.strategy=megatron", *sizes]
    config, notes = load_config([], [*line, "critic.megatron.param_offload=True"])
    assert (config.actor.backend, config.actor.sharding.tensor_parallel) == ("megatron", 4)
    assert (config.critic.backend, config.critic.sharding.param_offload) == ("megatron", True)
    assert notes == [
        f"{sizes[1].split('=')[0]} has no effect: every rank holds whole activations between matrix products"
    ]
    config, notes = load_config([], sizes)
    assert (config.actor.backend, config.actor.sharding.tensor_parallel, len(notes)) == ("fsdp", 1, 2)
    with pytest.raises(ConfigError, match="pipeline_model_parallel_size=2 is not supported here"):
        load_config([], [line[0], f"{section}.pipeline_model_parallel_size=2"])


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("critic.model.lora_rnk", "critic.model.lora_rank"),
        ("actor_rollout_ref.actor.optim.lr_warmup_stps", "actor_rollout_ref.actor.optim.lr_warmup_steps"),
        ("actor_rollout_ref.actor.fsdp_config.param_ofload", "actor_rollout_ref.actor.fsdp_config.param_offload"),
        ("actor_rollout_ref.rollout.multi_turn.max_turn", "actor_rollout_ref.rollout.multi_turn.max_turns"),
        ("reward_model.enabel", "reward_model.enable"),
        ("trainer.profiler.enabel", "trainer.profiler.enable"),
        # Any key may follow reward_kwargs, but this one is a near miss of a key that has an effect.
        ("reward_model.reward_kwargs.overlong_buffer_cfg.penalty_facto", "overlong_buffer_cfg.penalty_factor"),
    ],
)
def test_a_misspelt_key_is_refused_with_the_key_that_was_meant(typo: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([], [f"{typo}=1"])
    assert f"{typo}: there is no such setting" in str(caught.value)
    assert f"{meant}=VALUE" in caught.value.hint


def test_keys_that_verl_leaves_open_are_accepted_with_a_note() -> None:
    keys = [
        "actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space",
        "actor_rollout_ref.actor.profiler.tool_config.nsys.discrete",
        "ray_kwargs.ray_init.num_cpus",
    ]
    _, notes = load_config([], [f"{key}=1" for key in keys])
    assert [note.split(" has no effect: ")[0] for note in notes] == keys


@pytest.mark.parametrize(
    "argument",
    [
        "actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config={method: ngram}",
        "reward_model.reward_kwargs.scale=2",
        "data.image_key=pictures",
        "actor_rollout_ref.rollout.agent.default_agent_loop=my_agent",
        "actor_rollout_ref.model.override_config.attention_dropout=0.1",
        "critic.model.override_config.attention_dropout=0.1",
        "actor_rollout_ref.rollout.response_length=7",
        "actor_rollout_ref.rollout.max_model_len=600",
        "data.gen_batch_size=3",
        "trainer.device=npu",
    ],
)
def test_a_key_that_changes_the_result_is_refused(argument: str) -> None:
    with pytest.raises(ConfigError, match=argument.split("=")[0]):
        load_config(["verl"], [argument])


@pytest.mark.parametrize(
    "argument",
    [
        "actor_rollout_ref.model.override_config.attention_dropout=0.",
        "actor_rollout_ref.rollout.response_length=512",
        "actor_rollout_ref.rollout.response_length=${data.max_response_length}",
        "actor_rollout_ref.rollout.max_model_len=1024",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=1",
        "data.image_key=images",
        "data.gen_batch_size=1024",
        "model_engine=dp",
        "hydra.searchpath=null",
    ],
)
def test_a_neutral_value_needs_no_note(argument: str) -> None:
    assert load_config(["verl"], [argument])[1] == load_config(["verl"], [])[1]


def test_micro_batches_of_all_devices_are_divided() -> None:
    line = ["actor_rollout_ref.actor.ppo_micro_batch_size=64", "trainer.nnodes=2", "trainer.n_gpus_per_node=8"]
    assert load_config([], line)[0].actor.micro_batch_size == 4


def test_the_model_engine_sets_the_backend_of_both_roles() -> None:
    config, _ = load_config([], ["model_engine=megatron", "critic.strategy=fsdp"])
    assert (config.actor.backend, config.critic.backend) == ("megatron", "fsdp")


def test_engines_span_as_many_gpus_as_in_verl() -> None:
    rollout = "actor_rollout_ref.rollout"
    config, notes = load_config([], [f"{rollout}.tensor_model_parallel_size=4", f"{rollout}.data_parallel_size=2"])
    assert config.rollout.tensor_parallel == 4
    assert notes == [
        f"{rollout}.data_parallel_size has no effect: "
        "every rollout.tensor_parallel GPUs hold an engine, and the engines share the prompts"
    ]
    with pytest.raises(ConfigError, match="pipeline"):
        load_config([], [f"{rollout}.pipeline_model_parallel_size=2"])


def test_a_key_without_effect_is_accepted_with_the_reason() -> None:
    _, notes = load_config([], ["actor_rollout_ref.model.use_remove_padding=False"])
    assert notes == ["actor_rollout_ref.model.use_remove_padding has no effect: rows are always packed without padding"]


def test_a_token_budget_has_an_effect_with_dynamic_batches() -> None:
    budgets = [f"{role}.ppo_max_token_len_per_gpu=9000" for role in ("actor_rollout_ref.actor", "critic")]
    off, notes = load_config([], budgets)
    assert (off.actor.micro_batch_tokens, off.critic.micro_batch_tokens, len(notes)) == (None, None, 2)
    on, _ = load_config([], [*budgets, "actor_rollout_ref.actor.use_dynamic_bsz=True"])
    assert (on.actor.micro_batch_tokens, on.critic.micro_batch_tokens) == (9000, 9000)


def test_an_enabled_reward_model_replaces_the_rule() -> None:
    line = ["reward_model.model.path=judge", "reward_model.max_length=512", "reward_model.model.input_tokenizer=null"]
    on = load_config([], ["reward_model.enable=True", *line])[0].reward
    assert (on.model.path, on.model.max_length, on.model.input, on.weight) == (
        Path("judge").absolute(),
        512,
        "tokens",
        0,
    )
    off = load_config([], ["reward_model.enable=False", *line])[0].reward
    assert (off.model.path, off.weight) == (None, 1)


@pytest.mark.parametrize(
    ("kind", "estimator", "unbiased"), [("low_var_kl", "k3", False), ("k3+", "k3", True), ("kl", "k1", False)]
)
def test_the_gradient_of_the_kl_is_verl_s(kind: str, estimator: str, unbiased: bool) -> None:
    actor = load_config([], [f"actor_rollout_ref.actor.kl_loss_type={kind}"])[0].actor
    assert (actor.kl_loss_estimator, actor.kl_loss_unbiased) == (estimator, unbiased)
    assert not load_config(["verl"], [])[0].actor.kl_loss_unbiased


def test_save_freq_of_minus_one_saves_by_time_only_without_other_keys_of_verl() -> None:
    """verl's -1 means no checkpoints while the run goes on."""
    assert load_config([], ["trainer.save_freq=-1"])[0].trainer.minutes_between_saves == 15
    for line in (["actor_rollout_ref.actor.optim.lr=1e-6"], ["trainer.experiment_name=mine"]):
        trainer = load_config([], [*line, "trainer.save_freq=-1"])[0].trainer
        assert (trainer.save_freq, trainer.minutes_between_saves) == (-1, 0)
        assert load_config([], line)[0].trainer.minutes_between_saves == 15
        assert load_config([], [*line, "trainer.save_freq=20"])[0].trainer.save_freq == 20
        own = load_config([], [*line, "trainer.save_freq=-1", "trainer.save_minutes=5"])[0].trainer
        assert own.minutes_between_saves == 5


def test_a_run_with_a_name_resumes_itself() -> None:
    config, _ = load_config([], ["trainer.resume_mode=auto", "trainer.experiment_name=mine"])
    assert config.trainer.resumes_itself
    config, notes = load_config([], ["trainer.resume_mode=auto"])
    assert config.trainer.resume is None
    assert "always a new one" in notes[0]


@pytest.mark.parametrize(
    ("given", "kept"),
    [({"actor": "3"}, 3), ({"actor": "3", "critic": "5"}, 5), ({"actor": "3", "critic": "null"}, None)],
)
def test_the_larger_of_verl_s_numbers_of_checkpoints_counts(given: dict[str, str], kept: int | None) -> None:
    line = [f"trainer.max_{role}_ckpt_to_keep={number}" for role, number in given.items()]
    assert load_config([], line)[0].trainer.keep_checkpoints == kept


def test_our_keys_override_verl_s_defaults() -> None:
    config, _ = load_config(["verl"], ["rollout.samples_per_prompt=4", "algorithm.kl_coefficient=0.5"])
    assert config.actor.mini_batch_size == 256 * 4
    assert config.algorithm.kl_coefficient == 0.5


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        ("rollout.samples_per_prompt=4", "actor_rollout_ref.rollout.n=8"),
        ("actor_rollout_ref.rollout.n=4", "rollout.samples_per_prompt=8"),
    ],
)
def test_mini_batches_are_counted_with_the_later_number_of_samples(earlier: str, later: str) -> None:
    config, _ = load_config(["verl"], [earlier, later])
    assert (config.rollout.samples_per_prompt, config.actor.mini_batch_size) == (8, 256 * 8)


@pytest.mark.parametrize("off", ["-1", "-1.0", "null", "false"])
def test_a_ratio_cap_that_is_off_sets_no_correction(off: str) -> None:
    assert load_config([], [f"actor_rollout_ref.actor.tis_imp_ratio_cap={off}"])[0].algorithm.correction == "none"


def test_a_role_s_own_setting_overrides_an_inherited_one() -> None:
    own, actor = "critic.ppo_mini_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=32"
    for arguments in ([own, actor], [actor, own]):
        config, _ = load_config([], ["rollout.samples_per_prompt=1", *arguments])
        assert (config.actor.mini_batch_size, config.critic.mini_batch_size) == (32, 64)


def test_the_hint_for_an_unknown_key_includes_verl_s_keys() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([], ["actor_rollout_ref.actor.ppo_mini_batchsize=8"])
    assert "actor_rollout_ref.actor.ppo_mini_batch_size" in caught.value.hint


def test_a_key_without_a_rule_is_accepted_with_verl_s_default_and_refused_with_another_value() -> None:
    key = "actor_rollout_ref.rollout.logprobs_mode"
    assert load_config([], [f"{key}=processed_logprobs"])[1] == []
    with pytest.raises(ConfigError, match=f"{key}=raw_logits is not supported here") as caught:
        load_config([], [f"{key}=raw_logits"])
    assert caught.value.hint == "supported: processed_logprobs"


@pytest.mark.parametrize(
    ("argument", "feature"),
    [
        ("actor_rollout_ref.actor.ulysses_sequence_parallel_size=2", "context parallelism"),
        ("actor_rollout_ref.rollout.expert_parallel_size=8", "experts"),
        ("actor_rollout_ref.actor.freeze_vision_tower=True", "vision"),
        ("actor_rollout_ref.model.mtp.enable=True", "multi-token prediction"),
    ],
)
def test_a_refusal_names_the_feature(argument: str, feature: str) -> None:
    with pytest.raises(ConfigError, match=feature):
        load_config([], [argument])


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


def test_every_problem_is_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([], ["algorithm.adv_estimator=mine", "trainer.val_onli=true"])
    assert "2 settings cannot be used" in str(caught.value)
    assert "algorithm.adv_estimator=mine is not supported here (supported: " in str(caught.value)
    assert "did you mean trainer.val_only=VALUE?" in str(caught.value)


@pytest.mark.parametrize("section", ["override_config", "override_config.model_config"])
def test_entries_of_the_models_configuration_are_overridden(section: str) -> None:
    config, _ = load_config([], [f"+actor_rollout_ref.model.{section}.max_position_embeddings=32768"])
    assert config.model.override_config == {"max_position_embeddings": 32768}


def test_adapters_start_from_a_directory_and_leave_layers_out() -> None:
    config, _ = load_config(
        [],
        [
            "actor_rollout_ref.model.lora_rank=8",
            "actor_rollout_ref.model.lora_adapter_path=/adapters/start",
            "actor_rollout_ref.model.exclude_modules=[down_proj]",
        ],
    )
    assert (config.actor.lora.path, config.actor.lora.exclude_modules) == (Path("/adapters/start"), ["down_proj"])
    config, _ = load_config([], ["actor_rollout_ref.model.exclude_modules=.*layers.1.*"])
    assert config.actor.lora.exclude_modules == [".*layers.1.*"]


@pytest.mark.parametrize("section", ["data", "actor_rollout_ref.model", "critic.model"])
def test_trust_in_a_models_own_code_is_noted(section: str) -> None:
    assert load_config([], [f"{section}.trust_remote_code=False"])[1] == []
    _, notes = load_config([], [f"{section}.trust_remote_code=True"])
    assert "those that bring their own are refused" in notes[0]
