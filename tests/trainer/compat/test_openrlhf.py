"""Command lines of OpenRLHF as settings of ours."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from trainer.cli import app
from trainer.compat.importers.openrlhf import DEFAULTS, ROW, RULES
from trainer.config.imports import Imported, import_command_line
from trainer.config.tree import Config

GIVEN = (
    "--actor.model_name_or_path /models/actor --data.prompt_dataset /data/train.jsonl --data.label_key answer "
    "--data.max_len 3072 --rollout.max_new_tokens 2048 --rollout.n_samples_per_prompt 8 --rollout.batch_size 128 "
    "--train.batch_size 1024 --data.apply_chat_template"
)
SCRIPT = f"""
set -x
MODEL=/models/actor
ray job submit --address=http://127.0.0.1:8265 -- python3 -m openrlhf.cli.train_ppo_ray \\
    --actor.num_nodes 2 {GIVEN.replace("/models/actor", "$MODEL")} \\
    --algo.advantage.estimator group_norm --algo.kl.use_loss --algo.kl.estimator k3 --algo.kl.init_coef 1e-3 \\
    --actor.eps_clip_low_high 0.2 0.27 --eval.dataset /data/test.jsonl --train.colocate_all
"""


def imported(more: str = "") -> Imported:
    return import_command_line(ROW, "train", [*GIVEN.split(), *more.split()], Config)


def settings(more: str = "") -> Any:
    found = imported(more)
    assert [str(problem) for problem in found.missing] == []
    return found.config


def test_every_rule_and_every_default_is_about_an_argument() -> None:
    assert RULES.keys() <= DEFAULTS.keys()


def test_defaults_of_openrlhf_count_where_nothing_is_given() -> None:
    config = settings()
    assert config.algorithm.advantage == "gae"
    assert (config.actor.learning_rate, config.critic.learning_rate) == (1e-6, 9e-6)
    assert config.actor.optimizer.betas == config.critic.optimizer.betas == (0.9, 0.95)
    schedule = config.actor.schedule
    assert (schedule.name, schedule.warmup_ratio, schedule.min_ratio) == ("cosine", 0.03, 0.1)
    assert config.actor.clip_dual == 1e9  # OpenRLHF clips once
    assert (config.trainer.seed, config.model.dtype) == (42, "bfloat16")
    assert (config.data.max_prompt_length, config.data.max_response_length) == (1024, 2048)


@pytest.mark.parametrize(
    ("line", "key", "expected"),
    [
        ("--algo.advantage.estimator rloo --algo.kl.init_coef 0", "algorithm.advantage", "rloo"),
        ("--algo.advantage.estimator dr_grpo --algo.kl.use_loss", "algorithm.divide_by_std", False),
        ("--algo.kl.use_loss --algo.kl.init_coef 0.002", "actor.kl_loss_coefficient", 0.002),
        ("--algo.kl.use_loss --algo.kl.init_coef 0.002", "algorithm.kl_coefficient", 0.0),
        ("--algo.kl.target 0.2 --algo.kl.horizon 500", "algorithm.kl_control", "adaptive"),
        ("--actor.policy_loss_type gspo", "actor.policy_loss", "gspo"),
        ("--actor.dual_clip 4", "actor.clip_dual", 4.0),
        ("--critic.lr_scheduler constant", "critic.schedule.name", "constant"),
        ("--ds.lora.rank 16 --ds.lora.alpha 32", "actor.lora.alpha", 32.0),
        ("--ds.lora.rank 16 --ds.lora.target_modules q_proj v_proj", "actor.lora.target_modules", ["q_proj", "v_proj"]),
        ("--reward.overlong_buffer_len 512", "reward.overlong_buffer", 512),
        ("--eval.dataset /data/test.jsonl", "validation.samples", 4),
        ("--logger.wandb.key x --logger.wandb.run_name mine --ckpt.load_enable", "trainer.resume", "auto"),
        ("--algo.advantage.is_correction_level token", "algorithm.correction", "icepop"),
        ("--reward.model_name_or_path /models/judge", "reward.weight", 0.0),
    ],
)
def test_an_argument_is_our_setting(line: str, key: str, expected: object) -> None:
    value = settings(line)
    for name in key.split("."):
        value = getattr(value, name)
    assert value == expected


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ("--actor.learning_rate 1e-6", "--actor.learning_rate: there is no such argument", "did you mean --actor"),
        ("--train.enable_ema", "--train.enable_ema=True is not supported here", "supported: False"),
        ("--ds.ring_attn_size 2", "--ds.ring_attn_size=2 is not supported here", "supported: 1"),
        ("--ds.lora.dropout 0.1", "--ds.lora.dropout=0.1 is not supported here", "supported: 0"),
        ("--reward.remote_url /mine/reward.py", "--reward.remote_url /mine/reward.py", "reward.custom_function.path"),
        ("--algo.advantage.estimator flash_reinforce", "estimator flash_reinforce is not supported", "supported: gae"),
        ("--actor.optim muon", "--actor.optim=muon is not supported here", "supported: adam"),
        ("--rollout.max_new_tokens 4096", "needs a limit of each response", "--rollout.max_new_tokens"),
        ("--train.batch_size 1000", "mini_batch_size=1000 does not divide the 1024 responses", ""),
    ],
)
def test_what_cannot_be_done_is_missing(line: str, message: str, hint: str) -> None:
    found = imported(line)
    assert any(message in str(problem) and hint in problem.hint for problem in found.missing), found.missing


def test_what_happens_in_another_way_is_said() -> None:
    found = imported("--algo.advantage.estimator rloo --algo.dynamic_filtering_enable")
    differences = "\n".join(found.differs)
    assert "the baseline includes the KL in the reward" in differences
    assert "data.prompt_dataset: give each row reward_model.ground_truth (answer)" in differences
    assert "rewards are not clipped" in differences
    assert "rendered with the model's chat template" not in differences  # --data.apply_chat_template is given


def test_a_script_becomes_a_file_that_trains(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT)
    result = CliRunner().invoke(app, ["import", str(script)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "--train.batch_size 1024 -> actor.mini_batch_size=1024\n" in result.output
    assert "train.colocate_all has no effect: where roles run changes no result" in result.output
    text = script.with_suffix(".yaml").read_text()
    assert "python -m trainer train --config run.yaml" in text
    config = Config.model_validate(yaml.safe_load(text))
    assert (config.algorithm.advantage, config.actor.kl_loss_coefficient) == ("grpo", 1e-3)
    assert (config.actor.clip_ratio_low, config.actor.clip_ratio_high) == (0.2, 0.27)
    assert config.trainer.nnodes == 2
