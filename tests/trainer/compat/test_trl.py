"""Command lines and YAML files of TRL as settings of ours."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from trainer.cli import app
from trainer.compat.importers.trl import ROW, defaults, rules
from trainer.config.imports import Imported, import_command_line
from trainer.config.section import Section
from trainer.config.tree import Config
from trainer.errors import ConfigError
from trainer.runs.offline.dpo import DpoConfig
from trainer.runs.offline.kto import KtoConfig

MODELS: dict[str, type[Section]] = {"train": Config, "dpo": DpoConfig, "kto": KtoConfig}
GIVEN = "--model_name_or_path /models/actor --dataset_name /data/train.jsonl --num_processes 2"


def imported(command: str, more: str = "") -> Imported:
    ours = ROW.starts("trl", [command])
    assert ours is not None
    return import_command_line(ROW, ours, [command, *GIVEN.split(), *more.split()], MODELS[ours])


def settings(command: str, more: str = "") -> Any:
    found = imported(command, more)
    assert [str(problem) for problem in found.missing] == []
    return found.config


@pytest.mark.parametrize("command", MODELS)
def test_every_rule_is_about_an_argument(command: str) -> None:
    known = set().union(*(defaults(name) for name in MODELS))
    assert set(rules(command)) <= known


def test_defaults_of_grpo_count_where_nothing_is_given() -> None:
    config = settings("grpo")
    assert (config.rollout.samples_per_prompt, config.data.train_batch_size, config.actor.mini_batch_size) == (8, 2, 16)
    assert (config.algorithm.advantage, config.algorithm.divide_by_std) == ("grpo", True)
    assert (config.actor.kl_loss_coefficient, config.algorithm.kl_coefficient) == (0.0, 0.0)
    assert (config.actor.loss_aggregation, config.actor.clip_dual) == ("token-mean", 1e9)
    assert (config.actor.schedule.name, config.trainer.total_epochs, config.trainer.seed) == ("linear", 3, 42)
    assert (config.model.dtype, config.actor.weights_dtype) == ("bfloat16", "float32")


@pytest.mark.parametrize(
    ("command", "line", "key", "expected"),
    [
        ("grpo", "--gradient_accumulation_steps 4 --steps_per_generation 8", "data.train_batch_size", 16),
        ("grpo", "--gradient_accumulation_steps 4 --steps_per_generation 8", "actor.mini_batch_size", 64),
        ("grpo", "--loss_type dr_grpo --max_completion_length 700", "actor.loss_scale_length", 700),
        ("grpo", "--loss_type grpo", "actor.loss_aggregation", "seq-mean-token-mean"),
        ("grpo", "--importance_sampling_level sequence", "actor.policy_loss", "gspo"),
        ("grpo", "--beta 0.04", "actor.kl_loss_coefficient", 0.04),
        ("grpo", "--epsilon 0.2 --epsilon_high 0.28", "actor.clip_ratio_high", 0.28),
        ("grpo", "--scale_rewards none", "algorithm.divide_by_std", False),
        ("grpo", "--num-iterations 2", "actor.ppo_epochs", 2),
        ("grpo", "--use_vllm", "algorithm.correction", "sequence_icepop"),
        ("grpo", "--use_vllm --vllm_importance_sampling_mode token_truncate", "algorithm.correction_high", 3.0),
        ("grpo", "--reward_funcs accuracy_reward", "reward.name", "math"),
        ("grpo", "--use_peft --lora_r 32 --lora_dropout 0", "actor.lora.rank", 32),
        ("dpo", "--beta 0.2", "dpo.beta", 0.2),
        ("dpo", "--loss_type ipo", "dpo.loss", "ipo"),
        ("dpo", "--per_device_train_batch_size 4 --gradient_accumulation_steps 2", "data.train_batch_size", 16),
        ("dpo", "--warmup_steps 0.1", "actor.schedule.warmup_ratio", 0.1),
        ("kto", "--desirable_weight 1.5", "kto.desirable_weight", 1.5),
        ("kto", "", "data.shuffle", False),
    ],
)
def test_an_argument_is_our_setting(command: str, line: str, key: str, expected: object) -> None:
    value = settings(command, line)
    for name in key.split("."):
        value = getattr(value, name)
    assert value == expected


@pytest.mark.parametrize(
    ("command", "line", "message", "hint"),
    [
        ("grpo", "--loss_type vespo", "--loss_type=vespo is not supported here", "dapo"),
        ("grpo", "--delta 2", "--delta=2 is not supported here", "None"),
        ("grpo", "--top_entropy_quantile 0.2", "--top_entropy_quantile=0.2 is not supported here", "1.0"),
        ("grpo", "--reward_funcs think_format_reward", "--reward_funcs think_format_reward", "reward.custom_function"),
        ("grpo", "--learning_rat 1e-6", "--learning_rat: there is no such argument", "did you mean --learning_rate?"),
        ("grpo", "--num_generations 7", "are no multiple of --num_generations 7", "--generation_batch_size"),
        ("dpo", "--loss_type sigmoid bco_pair", "--loss_type sigmoid bco_pair is not supported", "apo_zero"),
        ("dpo", "--use_weighting", "--use_weighting=True is not supported here", "False"),
        ("kto", "--sync_ref_model", "--sync_ref_model=True is not supported here", "False"),
        ("kto", "--num_train_epochs 0.5", "only whole epochs", "--max_steps"),
    ],
)
def test_what_cannot_be_done_is_missing(command: str, line: str, message: str, hint: str) -> None:
    found = imported(command, line)
    assert any(message in str(problem) and hint in problem.hint for problem in found.missing), found.missing


def test_a_batch_needs_the_number_of_processes() -> None:
    found = import_command_line(ROW, "dpo", ["dpo", *GIVEN.split()[:-2]], DpoConfig)
    assert any("--num_processes is not given" in str(problem) for problem in found.missing)


def test_a_command_without_a_counterpart_is_refused() -> None:
    with pytest.raises(ConfigError, match="trl sft has no counterpart here"):
        ROW.starts("trl", ["sft", "--model_name_or_path", "x"])
    assert ROW.starts("train.py", ["grpo"]) is None


def test_a_yaml_file_is_read_and_the_command_line_overrides_it(tmp_path: Path) -> None:
    arguments = {
        "model_name_or_path": "/models/actor",
        "dataset_name": "/data/train.jsonl",
        "num_processes": 1,
        "beta": 0.5,
        "bf16": False,
        "loss_type": ["hinge"],
    }
    (tmp_path / "dpo.yaml").write_text(yaml.safe_dump(arguments))
    script = tmp_path / "run.sh"
    script.write_text(f"trl dpo --config {tmp_path / 'dpo.yaml'} --beta 0.3\n")
    result = CliRunner().invoke(app, ["import", str(script), "--output", str(tmp_path / "ours.yaml")])
    assert result.exit_code == 0, result.output
    text = (tmp_path / "ours.yaml").read_text()
    assert "python -m trainer dpo --config ours.yaml" in text
    config = DpoConfig.model_validate(yaml.safe_load(text))
    assert (config.dpo.loss, config.dpo.beta, config.model.dtype) == ("hinge", 0.3, "float32")
