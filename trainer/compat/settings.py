"""The settings of a run in this trainer's keys, in verl's, or in both: verl's are translated before anything else."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from trainer.compat.verl import sft
from trainer.compat.verl.translate import PPO, Dialect, translate
from trainer.config import overrides
from trainer.config.files import PRESETS
from trainer.config.overrides import OtherKeys, Source, build, given_settings, hint_for, is_below, settings
from trainer.config.sft import SftConfig
from trainer.config.tree import Config, RunConfig
from trainer.config.trees import TREES
from trainer.errors import ConfigError

RunSettings = TypeVar("RunSettings", bound=RunConfig)

NO_DIALECT = Dialect({}, {}, {})
DIALECTS: dict[type[BaseModel], Dialect] = {Config: PPO, SftConfig: sft.DIALECT}
"""verl's keys for a kind of run. It has no trainer of the other kinds."""
CONFIGURATIONS: dict[str, Sequence[str]] = {
    "ppo_trainer": ["verl"],
    "ppo_megatron_trainer": ["verl_megatron"],
    "one_step_off_ppo_trainer": ["verl_one_step_off"],
    "one_step_off_ppo_megatron_trainer": ["verl_one_step_off", "verl_megatron"],
    "fully_async_ppo_trainer": ["verl_fully_async"],
    "fully_async_ppo_megatron_trainer": ["verl_fully_async", "verl_megatron"],
    "dapo_trainer": ["verl_dapo"],
    "dapo_megatron_trainer": ["verl_dapo", "verl_megatron"],
    "entropy_trainer": ["verl_dapo"],
    "sft_trainer_engine": [str(PRESETS / "sft" / "verl.yaml")],
    "sft_trainer": [str(PRESETS / "sft" / "verl_fsdp.yaml")],
}
"""Presets with the values of verl's own configurations, by their names."""


def load_config(
    files: Sequence[Source],
    arguments: Sequence[str],
    model: type[RunSettings] = Config,  # type: ignore[assignment]
) -> tuple[RunSettings, list[str]]:
    """The settings of a run: presets, YAML files or their content, then `KEY=VALUE` arguments. The last value of a
    setting counts.

    verl's keys work wherever ours do. Returns the config, and notes about those that differ or have no effect.
    Raises ConfigError; see `parse_overrides`.
    """
    others = other_keys(model)
    given = given_settings(files, arguments, model, others)
    known = [setting.key for setting in settings(model)]
    dialect = DIALECTS.get(model, NO_DIALECT)
    translated, notes = translate(given, known, lambda key: hint_for(key, model, others), dialect)
    config = build(model, translated)
    return config, [*notes, *config.notes]


def explain_settings(names: Sequence[str]) -> list[str]:
    """A paragraph per setting, see `overrides.explain_settings`. Raises ConfigError also for a name that is verl's."""
    paragraphs = []
    for name in names:
        of_verl = any(is_below(name, key) for tree in TREES.values() for key in other_keys(tree).names)
        if of_verl and not any(is_below(name, setting.key) for tree in TREES.values() for setting in settings(tree)):
            raise ConfigError(
                f"{name} is verl's, and only settings of this trainer are explained",
                hint="give it a value, KEY=VALUE without blanks, to see what it means here",
            )
        paragraphs += overrides.explain_settings([name])
    return paragraphs


def hydra_files(config_name: str, config_path: str | None) -> Sequence[str]:
    """The file that Hydra's `--config-name` and `--config-path` name, or the presets of verl's own configuration."""
    name = config_name.removesuffix(".yaml")
    path = Path(config_path or ".") / f"{name}.yaml"
    return CONFIGURATIONS[name] if name in CONFIGURATIONS and not path.exists() else [str(path)]


@cache
def other_keys(model: type[BaseModel]) -> OtherKeys:
    """verl's keys for a kind of run."""
    dialect = DIALECTS.get(model, NO_DIALECT)
    exact = (key for key in dialect.rules if "*" not in key)
    return OtherKeys((*exact, *dialect.defaults), dialect.defaults, CONFIGURATIONS)
