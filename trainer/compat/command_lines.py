"""Command lines of tools with `--name value` arguments, as settings of ours.

A tool is a table of its arguments with their defaults, and a rule for each argument whose meaning this trainer has
under another name. An argument without a rule is accepted with its default and refused with any other value.
"""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from trainer.compat.verl.rules import Given, Rule, Translation, Value, typed, unsupported, word
from trainer.errors import ConfigError
from trainer.rows import Row


@dataclass(frozen=True, kw_only=True)
class Tool(Row):
    """A tool in `trainer/compat/importers/`. `name` is what the user knows it as.

    `starts(entry, arguments)` is the name of our command, like train, if the tool understands this command line, else
    None. `defaults(command)` are the arguments of that command, `rules` those of all commands. `prepared` changes the
    arguments before they are read, for a tool that also reads files.
    """

    starts: Callable[[str, Sequence[str]], str | None]
    defaults: Callable[[str], Mapping[str, Value]]
    rules: Callable[[str], Mapping[str, Rule]]
    prepared: Callable[[Sequence[str]], list[str]] = list


@dataclass
class Meaning:
    """Settings of ours, and what they have in common with the command line.

    `same` lists each given argument with our setting, `differs` what happens here in another way, `without_effect` what
    changes no result, `missing` what cannot be done.
    """

    settings: dict[str, Value] = field(default_factory=dict)
    same: list[str] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)
    without_effect: list[str] = field(default_factory=list)
    missing: list[ConfigError] = field(default_factory=list)


def differs(what: str, *ours: str) -> Rule:
    """The same value under our keys, with a note of what happens in another way here."""
    return lambda key, value, _given: Translation(dict.fromkeys(ours, value), f"{key}: {what}")


def meaning(tool: Tool, command: str, arguments: Sequence[str]) -> Meaning:
    """What a command line of a tool means here."""
    found = Meaning()
    defaults, rules = tool.defaults(command), tool.rules(command)
    given: dict[str, Value] = {}
    for name, value in _arguments(tool.prepared(arguments), defaults):
        if name in defaults:
            given[name] = value
        else:
            near = difflib.get_close_matches(name, defaults, n=1, cutoff=0.6)
            hint = f"did you mean --{near[0]}?" if near else f"{tool.name} has no such argument"
            found.missing.append(ConfigError(f"--{name}: there is no such argument", hint=hint))
    values = {**defaults, **given}
    for name, value in values.items():
        try:
            translation = rules.get(name, _default_only(defaults))(name, value, values)
        except ConfigError as problem:
            found.missing.append(problem)
            continue
        found.settings |= translation.settings
        _note(found, name, value, translation, name in given)
    return found


def _note(found: Meaning, name: str, value: Value, translation: Translation, given: bool) -> None:
    if translation.note and not translation.ignored:
        found.differs.append(translation.note)
    elif given and translation.ignored:
        found.without_effect.append(translation.note)
    elif given:
        ours = ", ".join(f"{key}={one}" for key, one in translation.settings.items())
        found.same.append(f"--{name} {_shown(value)}" + (f" -> {ours}" if ours else ""))


def _arguments(words: Sequence[str], defaults: Mapping[str, Value]) -> list[tuple[str, Value]]:
    """Names and values: `--name value`, `--name=value`, `--name` for a switch, and several values for a list."""
    found: list[tuple[str, Value]] = []
    rest = list(words)
    while rest:
        name, separator, value = rest.pop(0).partition("=")
        if not name.startswith("--"):
            found.append((name, True))
            continue
        name = _known(name.removeprefix("--"), defaults)
        values: list[Value] = [typed(value)] if separator else []
        while rest and not separator and not rest[0].startswith("--"):
            values.append(typed(rest.pop(0)))
        several = isinstance(defaults.get(name), list)
        found.append((name, values if several else values[0] if values else True))
        found += [(str(extra), True) for extra in ([] if several else values[1:])]
    return found


def _known(name: str, defaults: Mapping[str, Value]) -> str:
    """The name with underscores, as argparse stores it, if the tool has it."""
    stored = name.replace("-", "_")
    return stored if stored in defaults else name


def _default_only(defaults: Mapping[str, Value]) -> Rule:
    def rule(key: str, value: Value, _given: Given) -> Translation:
        if _plain(value) != _plain(defaults[key]):
            raise unsupported(f"--{key}", _shown(value), [_shown(defaults[key])])
        return Translation({})

    return rule


def _plain(value: Value) -> object:
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else word(value)


def _shown(value: Value) -> str:
    return " ".join(word(one) for one in value) if isinstance(value, list) else str(value)
