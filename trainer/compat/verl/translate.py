"""Translates verl's settings into ours.

`translate` turns `actor_rollout_ref.actor.optim.lr=1e-6` into `actor.learning_rate=1e-6`. A key without effect here is
accepted with a note; a value that asks for a missing feature is refused.
"""

import difflib
from collections.abc import Iterable
from fnmatch import fnmatchcase

from trainer.compat.verl import (
    actor,
    algorithm,
    critic,
    data,
    guides,
    model,
    optim,
    reference,
    reward,
    rollout,
    trainer,
)
from trainer.compat.verl.rules import Given, Rule, Value
from trainer.errors import ConfigError

# Exact keys are tried first, then patterns in this order. A pattern stands only for keys that verl leaves open.
RULES: dict[str, Rule] = {
    **data.RULES,
    **model.RULES,
    **actor.RULES,
    **optim.RULES,
    **reference.RULES,
    **rollout.RULES,
    **critic.RULES,
    **reward.RULES,
    **algorithm.RULES,
    **trainer.RULES,
    **guides.RULES,
}


def translate(given: Given, known: Iterable[str]) -> tuple[dict[str, Value], list[str]]:
    """Our settings for everything given, and notes for the user. The last value of a setting counts.

    Keys in `known` and unknown ones stay. Raises ConfigError for a value that asks for a missing feature, and for a
    misspelt key.
    """
    known = set(known)
    settings: dict[str, Value] = {}
    inherited: dict[str, Value] = {}
    notes: list[str] = []
    for key, value in given.items():
        rule = None if key in known else _rule(key)
        if rule is None:
            settings[key] = value
            continue
        translation = rule(key, value, given)
        settings |= translation.settings
        inherited |= translation.inherited
        if translation.note:
            notes.append(translation.note)
    return inherited | settings, notes


def _rule(key: str) -> Rule | None:
    """The rule of a key: its own, or the first pattern that matches. Raises ConfigError for a near miss of a key."""
    if key in RULES:
        return RULES[key]
    found = next((rule for pattern, rule in RULES.items() if "*" in pattern and fnmatchcase(key, pattern)), None)
    if found is not None:
        section, _, leaf = key.rpartition(".")
        siblings = [name.rpartition(".")[2] for name in RULES if name.rpartition(".")[0] == section]
        near = difflib.get_close_matches(leaf, [name for name in siblings if "*" not in name], n=1, cutoff=0.85)
        if near:
            raise ConfigError(f"{key}: there is no such setting", hint=f"did you mean {section}.{near[0]}=VALUE?")
    return found
