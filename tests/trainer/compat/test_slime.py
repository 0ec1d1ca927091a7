"""Command lines of slime as settings of ours."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from trainer.cli import app
from trainer.compat.importers import slime, slime_async
from trainer.compat.importers.slime import DEFAULTS, RULES
from trainer.compat.scripts import Command
from trainer.compat.tools import tool_of
from trainer.config.imports import Imported, import_command_line
from trainer.config.tree import Config

GIVEN = (
    "--hf-checkpoint /models/actor --prompt-data /data/train.jsonl --input-key prompt --label-key label "
    "--apply-chat-template --rm-type math --num-rollout 300 --rollout-batch-size 32 --n-samples-per-prompt 8 "
    "--rollout-max-response-len 2048 --global-batch-size 128 --attention-dropout 0.0 --hidden-dropout 0.0 --colocate"
)
SCRIPT = r"""
set -ex
CKPT_ARGS=(
   --hf-checkpoint /models/actor
   #--hf-checkpoint /models/other
   --ref-load /models/actor_torch_dist
   --save /runs/mine/
   --load /runs/mine
)
ROLLOUT_ARGS=(--prompt-data /data/train.jsonl --input-key prompt --label-key label --apply-chat-template
   --rm-type deepscaler --num-rollout 300 --rollout-batch-size 32 --n-samples-per-prompt 8
   --rollout-max-response-len 2048 --global-batch-size 256)
EVAL_ARGS=(--eval-interval 20 --eval-prompt-data aime /data/aime.jsonl --n-samples-per-eval-prompt 16)
GRPO_ARGS=(
   --advantage-estimator grpo
   --use-kl-loss --kl-loss-coef 0.001
   --kl-loss-type low_var_kl
   --eps-clip 0.2 --eps-clip-high 0.28
)
MISC_ARGS=(--attention-dropout 0.0 --hidden-dropout 0.0 --tensor-model-parallel-size 2 --sglang-mem-fraction-static 0.7)
WANDB_ARGS=(
   # --use-wandb
)
RUNTIME_ENV_JSON="{
  \"env_vars\": {\"PYTHONPATH\": \"/root/Megatron-LM/\"}
}"
ray job submit --address="http://127.0.0.1:8265" --runtime-env-json="${RUNTIME_ENV_JSON}" -- python3 train.py \
   --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate \
   "${CKPT_ARGS[@]}" ${ROLLOUT_ARGS[@]} ${EVAL_ARGS[@]} "${GRPO_ARGS[@]}" ${WANDB_ARGS[@]} ${MISC_ARGS[@]}
"""


def imported(more: str = "") -> Imported:
    return import_command_line(slime.ROW, "train", [*GIVEN.split(), *more.split()], Config)


def settings(more: str = "") -> Any:
    found = imported(more)
    assert [str(problem) for problem in found.missing] == []
    return found.config


def test_every_rule_is_about_an_argument() -> None:
    assert RULES.keys() <= DEFAULTS.keys()


def test_defaults_of_slime_count_where_nothing_is_given() -> None:
    config = settings()
    assert (config.algorithm.advantage, config.algorithm.divide_by_std) == ("grpo", True)
    assert config.actor.loss_aggregation == "seq-mean-token-mean"
    assert config.actor.clip_dual == 1e9  # slime clips once
    assert config.actor.optimizer.betas == (0.9, 0.999)
    assert (config.actor.weight_decay, config.actor.schedule.name) == (0.01, "linear")
    assert (config.data.shuffle, config.model.dtype, config.trainer.seed) == (False, "bfloat16", 42)


@pytest.mark.parametrize(
    ("line", "key", "expected"),
    [
        ("--num-steps-per-rollout 4", "actor.mini_batch_size", 64),
        ("--advantage-estimator gspo --eps-clip 3.5e-4", "actor.policy_loss", "gspo"),
        ("--advantage-estimator cispo", "actor.policy_loss", "cispo"),
        ("--advantage-estimator ppo --value-clip 0.3", "critic.clip_range_value", 0.3),
        ("--advantage-estimator ppo --lr 2e-6", "critic.learning_rate", 2e-6),
        ("--advantage-estimator ppo --kl-coef 0.01 --kl-loss-type k2", "algorithm.kl_estimator", "k2"),
        ("--advantage-estimator reinforce_plus_plus --normalize-advantages --gamma 0.9", "algorithm.gamma", 0.9),
        ("--disable-grpo-std-normalization", "algorithm.divide_by_std", False),
        ("--eps-clip 0.2 --eps-clip-high 0.28", "actor.clip_ratio_high", 0.28),
        ("--eps-clip-c 5", "actor.clip_dual", 5.0),
        ("--use-kl-loss --kl-loss-coef 0.002 --kl-loss-type low_var_kl", "actor.kl_loss_estimator", "k3"),
        ("--use-kl-loss --kl-loss-coef 0.002 --kl-loss-type low_var_kl", "actor.kl_loss_unbiased", False),
        ("--kl-loss-coef 0.002", "actor.kl_loss_coefficient", 0.0),
        ("--calculate-per-token-loss", "actor.loss_aggregation", "token-mean"),
        ("--use-tis --tis-clip 3", "algorithm.correction_high", 3.0),
        ("--use-rollout-logprobs", "algorithm.old_log_probs", "engine"),
        ("--lr-decay-style cosine --lr 4e-6 --min-lr 1e-6", "actor.schedule.min_ratio", 0.25),
        ("--lr-decay-style cosine --lr-warmup-fraction 0.1", "actor.schedule.warmup_ratio", 0.1),
        ("--rollout-num-gpus-per-engine 2", "rollout.tensor_parallel", 2),
        ("--rollout-max-context-len 3072", "data.max_prompt_length", 1024),
        ("--rollout-max-prompt-len 512", "data.overlong_prompts", "filter"),
        ("--rollout-stop </answer> User:", "rollout.stop", ["</answer>", "User:"]),
        ('--apply-chat-template-kwargs {"enable_thinking":false}', "data.chat_template_kwargs.enable_thinking", False),
        ("--rollout-temperature 0.8 --eval-prompt-data aime /data/aime.jsonl", "validation.temperature", 0.8),
        ("--eval-prompt-data a /data/a.jsonl b /data/b.jsonl --eval-top-k 1", "validation.top_k", 1),
        ("--rm-type dapo", "reward.name", "dapo"),
        (
            "--dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
            "algorithm.dynamic_sampling",
            True,
        ),
        ("--use-wandb --wandb-project mine", "trainer.project_name", "mine"),
        ("--save /runs/mine/ --save-interval 20", "trainer.save_freq", 20),
        ("--save /runs/mine/ --load /runs/mine", "trainer.resume", "auto"),
    ],
)
def test_an_argument_is_our_setting(line: str, key: str, expected: object) -> None:
    value = settings(line)
    for name in key.split("."):
        value = value[name] if isinstance(value, dict) else getattr(value, name)
    assert value == expected


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ("--eps-clip-hgih 0.3", "--eps-clip-hgih: there is no such argument", "did you mean --eps_clip_high?"),
        ("--context-parallel-size 2", "there is no context parallelism", "supported: 1"),
        ("--num-experts 64", "there is no training of experts", ""),
        ("--attention-dropout 0.1", "there is no dropout here", "set --attention_dropout 0"),
        ("--rm-type ifbench", "--rm_type=ifbench is not supported", "supported: math"),
        ("--custom-rm-path mine.score", "slime calls rewards with other arguments", "reward.custom_function.path"),
        ("--rm-type remote_rm --rm-url http://judge", "sends other requests to http://judge", "reward.server.url"),
        ("--advantage-estimator reinforce_plus_plus", "without --normalize_advantages", ""),
        ("--normalize-advantages", "grpo with --normalize_advantages", ""),
        ("--disable-rewards-normalization", "--disable_rewards_normalization=True", "supported: False"),
        ("--advantage-estimator gspo --eps-clip-c 3", "gspo has no dual clip here", "remove it"),
        ("--use-tis --tis-clip-low 0.5", "--tis_clip_low 0.5 is not supported", "only --tis_clip is"),
        ("--use-unbiased-kl", "--use_unbiased_kl=True is not supported", "supported: False"),
        ("--use-opd --opd-type sglang", "use_opd=True is not supported", ""),
        ("--loss-type sft_loss", "--loss_type=sft_loss is not supported", "supported: policy_loss"),
        ("--load /elsewhere", "checkpoints of Megatron cannot be read", "--hf_checkpoint"),
        ('--multimodal-keys {"image":"images"}', "multimodal_keys=", "vision is not supported"),
        ("--custom-generate-function-path mine.generate", "mine.generate is not supported", "rollout.environment.path"),
    ],
)
def test_what_cannot_be_done_is_missing(line: str, message: str, hint: str) -> None:
    found = imported(line)
    assert any(message in str(problem) and hint in problem.hint for problem in found.missing), found.missing


def test_what_happens_in_another_way_is_said() -> None:
    found = imported("--eval-prompt-data a /data/a.jsonl --eval-max-response-len 4096")
    differences = "\n".join(found.differs)
    assert "eval_max_response_len 4096: responses of a validation have at most 2048 tokens, too" in differences
    assert "rollout_max_prompt_len is not given: prompts of more than 1024 tokens are refused" in differences
    assert "rm_type math: math finds and compares answers with its own parser" in differences


def test_the_asynchronous_command_samples_one_step_ahead() -> None:
    found = tool_of(Command("/root/slime/train_async.py", tuple(GIVEN.split())))
    assert found is not None
    means = import_command_line(found[0], found[1], GIVEN.split(), Config)
    assert isinstance(means.config, Config)
    assert means.config.trainer.mode == "one_step_off"
    wrong = import_command_line(slime_async.ROW, "train", [*GIVEN.split(), "--update-weights-interval", "2"], Config)
    assert any("--update_weights_interval=2" in str(problem) for problem in wrong.missing)


def test_another_projects_train_py_is_not_slimes() -> None:
    assert tool_of(Command("train.py", ("--lr", "1"))) is None


def test_a_script_with_bash_arrays_becomes_a_file_that_trains(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT)
    result = CliRunner().invoke(app, ["import", str(script)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "--global_batch_size 256 -> actor.mini_batch_size=256\n" in result.output
    assert "tensor_model_parallel_size has no effect: FSDP2 shards the model" in result.output
    config = Config.model_validate(yaml.safe_load(script.with_suffix(".yaml").read_text()))
    assert (config.algorithm.advantage, config.actor.kl_loss_coefficient) == ("grpo", 1e-3)
    assert config.validation.samples == 16
    assert (str(config.trainer.output_dir), config.trainer.run_id) == ("/runs", "mine")
