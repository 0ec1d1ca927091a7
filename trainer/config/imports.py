"""Another tool's command as settings of ours, with a report of what stays the same and what is missing."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml
from pydantic import BaseModel

from trainer.compat.command_lines import Tool, meaning
from trainer.compat.verl.translate import Dialect, UnusableSettingsError, is_default, translate_key
from trainer.config.files import PRESETS, hydra_files
from trainer.config.overrides import build, given_settings, load_config, settings
from trainer.config.tree import Config, RunConfig
from trainer.errors import ConfigError

# Modules of verl that train as this trainer does, by the end of their names, with the preset of their defaults.
_PRESETS = {
    "trainer.main_ppo": "verl",
    "trainer.main_fastrl": "verl",
    "trainer.main_ppo_sync": "verl",
    "transfer_queue.main_ppo": "verl",
    "main_ppo_split": "verl",
    "one_step_off_policy.main_ppo": "verl_one_step_off",
    "fully_async_main": "verl_fully_async",
    "reward_queue.main": "verl_fully_async",
    "partial_rollout.main_ppo": "verl_partial_rollout",
    "main_dapo": "verl_dapo",
    "main_entropy": "verl_dapo",
}
# Those that fine-tune, with the file of their defaults.
_SFT_FILES = {
    f"trainer.{module}": str(PRESETS / "sft" / f"{name}.yaml")
    for module, name in (
        ("sft_trainer", "verl"),
        ("sft_trainer_ray", "verl"),
        ("fsdp_sft_trainer", "verl_fsdp"),
    )
}
_SAMPLES_ONLY = ("samples or scores without training", "set trainer.validate_only=true and data.validation_files")
# Other modules: what they do, and what to do instead.
_OTHERS = {
    "main_generation": _SAMPLES_ONLY,
    "main_generation_server": _SAMPLES_ONLY,
    "main_eval": _SAMPLES_ONLY,
}


@dataclass
class Imported:
    """`config` is None if the rest of the settings contradict each other.

    `same` lists each setting with ours, `differs` what happens here in another way, `without_effect` what changes no
    result, `missing` what this trainer cannot do.
    """

    config: BaseModel | None = None
    same: list[str] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)
    without_effect: list[str] = field(default_factory=list)
    missing: list[ConfigError] = field(default_factory=list)

    def report(self) -> str:
        """The differences in meaning, as text."""
        missing = [f"{problem}" + (f" ({problem.hint})" if problem.hint else "") for problem in self.missing]
        parts = (
            ("the same", self.same),
            ("different", self.differs),
            ("no effect on the result", self.without_effect),
            ("missing", missing),
        )
        return "\n".join(
            f"{title}: {len(lines)}\n" + "".join(f"  {line}\n" for line in lines) for title, lines in parts
        )

    def yaml(self) -> str:
        """The settings that differ from this trainer's defaults."""
        if self.config is None:
            return ""
        chosen = _different(self.config.model_dump(mode="json"), type(self.config)().model_dump(mode="json"))
        return yaml.safe_dump(chosen, sort_keys=False, allow_unicode=True)


def import_verl(
    arguments: Sequence[str], files: Sequence[str] = ("verl",), model: type[RunConfig] = Config
) -> Imported:
    """What a command line of verl means here. Problems are collected, so the result lists all of them."""
    files, rest = [*files], list(arguments)
    found = Imported()
    while True:
        try:
            found.config, found.without_effect = load_config(files, rest, model)
            break
        except ConfigError as error:
            found.missing += error.problems if isinstance(error, UnusableSettingsError) else [error]
            keys = {key_of(problem) for problem in found.missing}
            kept = [argument for argument in rest if argument.partition("=")[0].lstrip("+~") not in keys]
            if len(kept) == len(rest):
                break
            rest = kept
    known = {setting.key for setting in settings(model)}
    given = given_settings(files, rest, model) if found.config else {}
    named = {argument.partition("=")[0].lstrip("+~") for argument in rest}
    for key in (key for key in given if key in named):
        ours = {key: given[key]} if key in known else _translated(key, given, model.dialect)
        if ours or (key not in known and is_default(key, given[key], given, model.dialect)):
            settings_of_ours = ", ".join(f"{name}={value}" for name, value in ours.items())
            found.same.append(f"{key}={given[key]}" + (f" -> {settings_of_ours}" if ours else ""))
    return found


def _translated(key: str, given: dict[str, Any], dialect: Dialect) -> dict[str, Any]:
    translation = translate_key(key, given[key], given, str, dialect)
    return translation.settings | translation.computed


def import_command_line(tool: Tool, command: str, arguments: Sequence[str], model: type[BaseModel]) -> Imported:
    """What a command line of another tool means here, as settings of our `command`, whose type is `model`."""
    means = meaning(tool, command, arguments)
    found = Imported(None, means.same, means.differs, means.without_effect, means.missing)
    try:
        found.config = build(model, means.settings, [setting.key for setting in settings(model)])
    except ConfigError as error:
        found.missing.append(error)
    return found


def split_options(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Hydra's `--config-name` and `--config-path`, and the overrides of a command line."""
    options: dict[str, str] = {}
    overrides, rest = [], list(arguments)
    while rest:
        word = rest.pop(0)
        if word.startswith("--config-"):
            name, separator, value = word.partition("=")
            options[name] = value if separator or not rest else rest.pop(0)
        elif "=" in word or word.startswith("~"):
            overrides.append(word)
    return options, overrides


def preset_of(entry: str) -> str:
    """The preset with the defaults of a module or file of verl's that a command runs.

    Raises ConfigError for a module that does something else than this trainer.
    """
    module = _module(entry)
    for ending, preset in (_PRESETS | _SFT_FILES).items():
        if module.endswith(f".{ending}"):
            return preset
    what, hint = _OTHERS.get(
        module.rpartition(".")[2],
        ("is no entry point that this trainer knows", f"known: {', '.join(_PRESETS)}; it may train something else"),
    )
    raise ConfigError(f"{module.removeprefix('.')}: {what}", hint=hint)


def command_of(entry: str) -> str:
    """Our command for a module or file of verl's."""
    return "sft" if any(_module(entry).endswith(f".{ending}") for ending in _SFT_FILES) else "train"


def _module(entry: str) -> str:
    return "." + entry.removesuffix(".py").replace("/", ".")


def named_files(options: dict[str, str], entry: str) -> list[str]:
    """The preset of verl's entry point, and the file that Hydra's options name."""
    if "--config-name" not in options:
        return [preset_of(entry)]
    return [preset_of(entry), *hydra_files(options["--config-name"], options.get("--config-path"))]


def key_of(problem: ConfigError) -> str:
    """The key that a message begins with."""
    return re.split(r"[=:\s]", str(problem).lstrip("~+"), maxsplit=1)[0]


def _different(values: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in values.items():
        default = defaults.get(name)
        if isinstance(value, dict) and isinstance(default, dict) and value:
            value = _different(value, default)
            if value:
                found[name] = value
        elif value != default:
            found[name] = value
    return found
