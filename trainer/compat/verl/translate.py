"""Translates verl's settings into ours.

`translate` turns `actor_rollout_ref.actor.optim.lr=1e-6` into `actor.learning_rate=1e-6`. A key without effect here is
accepted with a note; a value that asks for a missing feature is refused.
"""

import difflib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from trainer.compat.verl import guides
from trainer.compat.verl.rules import Given, Rule, Translation, Value, unsupported, word
from trainer.compat.verl.sections import (
    actor,
    agents,
    algorithm,
    asynchronous,
    critic,
    data,
    distillation,
    model,
    optim,
    reference,
    reward,
    rollout,
    trainer,
)
from trainer.config.hydra import interpolated
from trainer.errors import ConfigError, UnusableSettingsError

# Exact keys are tried first, then patterns in this order. A pattern stands only for keys that verl leaves open.
RULES: dict[str, Rule] = {
    **data.RULES,
    **model.RULES,
    **actor.RULES,
    **optim.RULES,
    **reference.RULES,
    **rollout.RULES,
    **agents.RULES,
    **critic.RULES,
    **reward.RULES,
    **algorithm.RULES,
    **trainer.RULES,
    **guides.RULES,
    **distillation.RULES,
    **asynchronous.RULES,
}


DEFAULTS: dict[str, Value] = json.loads(Path(__file__).with_name("defaults.json").read_text(encoding="utf-8"))
"""verl's keys and default values. A key without a rule is accepted with its default, and refused with other values."""


@dataclass(frozen=True)
class Dialect:
    """The keys of one of verl's trainers: the rules for them, and their defaults.

    `same_names` are rules for keys that this trainer has as well, with other values.
    """

    rules: Mapping[str, Rule]
    defaults: Mapping[str, Value]
    same_names: Mapping[str, Rule]


PPO = Dialect(RULES, DEFAULTS, trainer.SAME_NAMES)


def translate(
    given: Given, known: Iterable[str], nearest: Callable[[str], str], dialect: Dialect = PPO
) -> tuple[dict[str, Value], list[str]]:
    """Our settings for everything given, and notes for the user. The last value of a setting counts.

    Keys in `known` stay. `nearest` is the hint for an unknown key. Raises ConfigError for keys that do not exist, and
    for values that ask for a missing feature: UnusableSettingsError if there are several.
    """
    known = set(known)
    settings: dict[str, Value] = {}
    inherited: dict[str, Value] = {}
    computed: dict[str, Value] = {}
    notes: list[str] = []
    problems: list[ConfigError] = []
    from_verl = any(key not in known for key in given)
    for key, value in given.items():
        shared = dialect.same_names.get(key) if from_verl else None
        if key in known and shared is None:
            settings[key] = value
            continue
        try:
            rule = shared or _rule(key, dialect)
            if rule is None:
                raise ConfigError(f"{key}: there is no such setting", hint=nearest(key))
            translation = rule(key, value, given)
        except ConfigError as problem:
            problems.append(problem)
            continue
        settings |= translation.settings
        inherited |= translation.inherited
        computed |= translation.computed
        if translation.note and not (translation.ignored and _is_default(key, value, given, dialect)):
            notes.append(translation.note)
    if problems:
        raise problems[0] if len(problems) == 1 else UnusableSettingsError(problems)
    return inherited | settings | computed, notes


def _is_default(key: str, value: Value, given: Given, dialect: Dialect) -> bool:
    """Whether verl has this key with this default."""
    defaults = dialect.defaults
    if key not in defaults:
        return False
    try:
        default = interpolated(key, defaults[key], lambda name: given[name] if name in given else defaults[name])
    except ConfigError:
        return False
    return _comparable(value) == _comparable(default)


def _comparable(value: Value) -> object:
    """Equal for values that mean the same in YAML: `1` and 1.0, `True` and true, `none` and null."""
    if isinstance(value, list):
        return [_comparable(item) for item in value]
    text = word(value)
    try:
        return float(text)
    except ValueError:
        return "null" if text == "none" else text


def _rule(key: str, dialect: Dialect) -> Rule | None:
    """The rule of a key: its own, the first pattern that matches, or that its default is what happens here anyway.

    Raises ConfigError for a near miss of a key below an open mapping.
    """
    rules, defaults = dialect.rules, dialect.defaults
    if key in rules:
        return rules[key]
    wildcard_rule = next(
        (rule for pattern, rule in rules.items() if "*" in pattern and fnmatchcase(key, pattern)), None
    )
    if key in defaults:
        return wildcard_rule or default_only(dialect)
    if wildcard_rule is not None:
        section, _, leaf = key.rpartition(".")
        siblings = [name.rpartition(".")[2] for name in (*rules, *defaults) if name.rpartition(".")[0] == section]
        near = difflib.get_close_matches(leaf, [name for name in siblings if "*" not in name], n=1, cutoff=0.85)
        if near:
            raise ConfigError(f"{key}: there is no such setting", hint=f"did you mean {section}.{near[0]}=VALUE?")
    return wildcard_rule


def default_only(dialect: Dialect) -> Rule:
    """verl's default is what happens here anyway. Other values are refused."""

    def rule(key: str, value: Value, given: Given) -> Translation:
        if not _is_default(key, value, given, dialect):
            raise unsupported(key, value, [word(dialect.defaults[key])])
        return Translation({})

    return rule
