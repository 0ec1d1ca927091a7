"""Settings from presets, YAML files and `KEY=VALUE` arguments. Later values replace earlier ones."""

import difflib
import json
import types
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from trainer.config.files import Bases, read_settings, settings_in
from trainer.config.hydra import flattened, interpolated, read_value, remove
from trainer.config.tree import Config
from trainer.config.trees import TREES
from trainer.errors import ConfigError

Settings = TypeVar("Settings", bound=BaseModel)


@dataclass(frozen=True)
class SettingHelp:
    """One leaf of the settings: its dotted key, its type, the type in words, default and description."""

    key: str
    annotation: Any
    expected: str
    default: Any
    description: str

    @property
    def nullable(self) -> bool:
        return type(None) in _members(self.annotation)

    @property
    def is_list(self) -> bool:
        return any(get_origin(member) in (list, tuple) for member in _members(self.annotation))

    @property
    def is_mapping(self) -> bool:
        return any(get_origin(member) is dict for member in _members(self.annotation))

    @property
    def is_number(self) -> bool:
        members = _members(self.annotation)
        return bool not in members and (int in members or float in members)

    @property
    def choices(self) -> list[str]:
        """The words that the setting accepts, if it is one of several words or a list of them."""
        members = [inner for member in _members(self.annotation) for inner in (get_args(member) or ())]
        literals = [*_members(self.annotation), *members]
        return [str(word) for literal in literals if get_origin(literal) is Literal for word in get_args(literal)]

    def paragraph(self) -> str:
        default = json.dumps(self.default, default=str)
        return f"{self.key}={default}  ({self.expected})\n    {self.description}".rstrip()


def settings(model: type[BaseModel], prefix: str = "") -> Iterator[SettingHelp]:
    """Every leaf of a config tree, in the order of the classes."""
    for name, field in model.model_fields.items():
        section = _section(field)
        if section is not None:
            yield from settings(section, f"{prefix}{name}.")
        else:
            default = field.get_default(call_default_factory=True)
            yield SettingHelp(prefix + name, field.annotation, _expected(field), default, field.description or "")


@dataclass(frozen=True)
class OtherKeys:
    """Keys of another tool that a command takes, too."""

    names: tuple[str, ...]
    """What hints may suggest."""
    defaults: Mapping[str, Any]
    """Their values where nothing sets them, for `${...}`."""
    bases: Bases


NO_OTHERS = OtherKeys((), {}, {})


Source = str | Mapping[str, Any]
"""A preset, a YAML file, or what such a file may hold."""


def given_settings(
    files: Sequence[Source], arguments: Sequence[str], model: type[BaseModel], others: OtherKeys
) -> dict[str, Any]:
    """What files and arguments set, by dotted key of this trainer or another tool; interpolations are replaced.

    Raises ConfigError; see `parse_overrides`.
    """
    defaults = {setting.key: setting.default for setting in settings(model)}
    known = list(defaults)
    mappings = [setting.key for setting in settings(model) if setting.is_mapping]
    given: dict[str, Any] = {}
    for file in files:
        if isinstance(file, str):
            source = read_settings(file, mappings, others.bases)
        else:
            source = settings_in("the mapping of settings", file, Path(), mappings, others.bases)
        _add(given, _leaves(source, model))
    for argument in arguments:
        if argument.startswith("~"):
            remove(argument[1:].partition("=")[0], given)
        else:
            key, value = _split(argument, model, others)
            parent = next((mapping for mapping in mappings if key.startswith(f"{mapping}.")), None)
            if parent is not None:
                key, value = parent, {**given.get(parent, {}), key.removeprefix(f"{parent}."): value}
            _add(given, _leaves(flattened(key, value, known), model))
    everything = ChainMap(given, dict(others.defaults), defaults)
    return {key: interpolated(key, value, everything.__getitem__) for key, value in given.items()}


def _leaves(source: Mapping[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """The values by setting: a section's own value goes to the setting that it stands for."""
    plain = dict(_plain_values(model))
    return {plain.get(key, key): value for key, value in source.items()}


def _plain_values(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, field in model.model_fields.items():
        section = _section(field)
        if section is not None:
            if leaf := getattr(section, "plain_value", None):
                yield prefix + name, f"{prefix}{name}.{leaf}"
            yield from _plain_values(section, f"{prefix}{name}.")


def _add(given: dict[str, Any], source: Mapping[str, Any]) -> None:
    for key, value in source.items():
        given.pop(key, None)  # a repeated key moves to the end: it is newer than its equivalents in between
        given[key] = value


def parse_overrides(
    arguments: Sequence[str],
    model: type[Settings] = Config,  # type: ignore[assignment]
    files: Sequence[str] = (),
) -> Settings:
    """The defaults changed by YAML files and `KEY=VALUE` arguments; the last value of a key counts.

    Values are YAML: `[a,b]` is a list, and `null` unsets. `a,b`, `none` and Hydra's `+KEY=VALUE` work as well. Raises
    ConfigError for an argument without `=`, an unknown key (the hint names the nearest one) and a value of the wrong
    type.
    """
    given: dict[str, Any] = {}
    for file in files:
        given |= read_settings(file)
    return build(model, given | dict(_split(argument, model) for argument in arguments))


def _split(argument: str, model: type[BaseModel], others: OtherKeys = NO_OTHERS) -> tuple[str, Any]:
    """Key and value of `KEY=VALUE`, without Hydra's plus signs. See `read_value` for the types of values."""
    key, separator, text = argument.partition("=")
    if not separator:
        raise ConfigError(f"{argument}: not of the form KEY=VALUE", hint=hint_for(key, model, others))
    return key.lstrip("+"), read_value(argument, text)


def build(model: type[Settings], given: Mapping[str, Any]) -> Settings:
    """A config from values by dotted key. Raises ConfigError."""
    known = {setting.key: setting for setting in settings(model)}
    tree: dict[str, Any] = {}
    for key, value in given.items():
        if key not in known:
            raise ConfigError(f"{key}: there is no such setting", hint=hint_for(key, model))
        *path, leaf = key.split(".")
        branch = tree
        for part in path:
            branch = branch.setdefault(part, {})
        branch[leaf] = _fitted(value, known[key])
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(*_explain(error, given, known)) from error


def explain_settings(names: Sequence[str]) -> list[str]:
    """A paragraph per setting of any command, for names of settings or sections: default, type and description.

    Raises ConfigError for an unknown name.
    """
    paragraphs = []
    for name in names:
        explained = _explained(name)
        if not explained:
            known = _commands()
            sections = {key.rpartition(".")[0] for key in known} - {"", name.rpartition(".")[0]}
            near = _nearest(name, dict.fromkeys(known, 0.0), dict.fromkeys(sorted(sections), 0.01))
            hint = f"did you mean {' or '.join(near)}?" if near else "`--fields` explains every setting"
            raise ConfigError(f"{name}: there is no such setting", hint=hint)
        paragraphs += explained
    return paragraphs


def every_section() -> list[str]:
    """The names under which `explain_settings` explains all settings: sections, and settings without one."""
    return list(dict.fromkeys(name for tree in TREES.values() for name in tree.model_fields))


def _explained(name: str) -> list[str]:
    """The paragraphs of a setting or section, from the first command that has it."""
    for command, tree in TREES.items():
        matches = [setting for setting in settings(tree) if is_below(name, setting.key)]
        if matches:
            elsewhere = [key for key in _commands() if key.endswith(f".{name}")]
            end = f"\n    a setting of {command}" + (f"; elsewhere {', '.join(elsewhere)}" if elsewhere else "")
            return [setting.paragraph() + ("" if tree is Config else end) for setting in matches]
    return []


def _commands() -> dict[str, str]:
    """The first command that has a setting, by the setting's key."""
    command_of: dict[str, str] = {}
    for command, tree in TREES.items():
        command_of |= {setting.key: command for setting in settings(tree) if setting.key not in command_of}
    return command_of


def _below(name: str, keys: Iterable[str]) -> list[str]:
    """The setting of this name, or those of the section."""
    return [key for key in keys if is_below(name, key)]


def is_below(name: str, key: str) -> bool:
    return key == name or key.startswith(f"{name}.")


def _section(field: FieldInfo) -> type[BaseModel] | None:
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _expected(field: FieldInfo) -> str:
    """The type in words, with its bounds: `number > 0`, `list of paths`, `integer >= 0 or null`."""
    bounds = [
        f"{sign} {getattr(rule, name)}"
        for rule in field.metadata
        for name, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
        if getattr(rule, name, None) is not None
    ]
    kinds = _kinds(field.annotation)
    kinds[0] = " ".join([kinds[0], " and ".join(bounds)]).rstrip()
    return " or ".join(kinds)


def _kinds(annotation: Any) -> list[str]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kinds(arguments[0])
    if origin in (Union, types.UnionType):
        return [kind for argument in arguments for kind in _kinds(argument)]
    if origin is Literal:
        return [" | ".join(str(argument) for argument in arguments)]
    if origin in (list, tuple):
        kind = _kinds(arguments[0])[0]
        return [f"list of {kind}" if get_origin(arguments[0]) is Literal else f"list of {kind}s"]
    names = {"int": "integer", "float": "number", "bool": "true or false", "str": "text", "NoneType": "null"}
    names |= {"Pattern": "regular expression", "dict": "mapping"}
    return [names.get(annotation.__name__, annotation.__name__.lower())]


def _fitted(value: Any, setting: SettingHelp) -> Any:
    """Text as a list or null where the setting takes one; other values as they are.

    A truth value for a number becomes text, because pydantic would read true as 1 and not report it.
    """
    if isinstance(value, bool) and setting.is_number:
        return str(value).lower()
    if isinstance(value, str) and setting.nullable and value.lower() == "none":
        return None
    if isinstance(value, str) and setting.is_list:
        return [item.strip() for item in value.split(",") if item.strip()]
    return value


def _members(annotation: Any) -> tuple[Any, ...]:
    """The members of a union without their annotations. A plain type is its only member."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(inner for member in get_args(annotation) for inner in _members(member))
    return (annotation,)


def _shown(value: Any) -> str:
    """A value as the user would write it."""
    if isinstance(value, str):
        return value
    return yaml.safe_dump(value, default_flow_style=True, width=float("inf")).removesuffix("...\n").strip()


def hint_for(key: str, model: type[BaseModel], others: OtherKeys = NO_OTHERS) -> str:
    """A hint for an unknown key: the nearest settings."""
    key = key.lstrip("-+").replace("-", "_")
    keys = [setting.key for setting in settings(model)]
    section = _below(key, keys)
    if section and key not in keys:
        return f"{key} is a section; its settings are {', '.join(section)}"
    commands = _commands()
    if "." in key and key in commands and key not in keys:
        return f"it is a setting of {commands[key]}"
    candidates = _nearest(key, dict.fromkeys(keys, 0.0), dict.fromkeys([*others.names, *commands], 0.03))
    if not candidates:
        return "`python -m trainer config SECTION` explains settings"
    elsewhere = {*commands} - {*keys, *others.names}
    meant = [f"{name}, a setting of {commands[name]}" if name in elsewhere else f"{name}=VALUE" for name in candidates]
    return f"did you mean {' or '.join(meant)}?"


def _nearest(key: str, *handicaps: Mapping[str, float]) -> list[str]:
    """The nearest names; of a name that is given twice, the first handicap counts."""
    chained = ChainMap(*map(dict, handicaps))
    return nearest(key, chained, chained.values())


def _explain(error: ValidationError, given: Mapping[str, Any], known: Mapping[str, SettingHelp]) -> tuple[str, str]:
    """Message and hint for a validation error. An error about several settings has no key."""
    problems: dict[str, str] = {}
    nearest: list[str] = []
    for detail in error.errors():
        key = ".".join(str(part) for part in detail["loc"])
        key = next((name for name in known if key == name or key.startswith(f"{name}.")), key)
        value = f"{key}={_shown(given[key])}" if key in given else key
        reason = f"expected {known[key].expected}" if key in known else detail["msg"].removeprefix("Value error, ")
        names_itself = not value or reason.startswith(f"{key}.")  # a rule between settings of one section
        problems.setdefault(key, reason if names_itself else f"{value}: {reason}")
        if detail["type"] == "literal_error":
            near = difflib.get_close_matches(str(detail["input"]), known[key].choices, n=1)
            nearest += [f"did you mean {name}?" for name in near]
    described = [f"{key}: {known[key].description}" for key in problems if key in known and known[key].description]
    return "; ".join(problems.values()), "; ".join(
        [*nearest, *described]
    ) or "`python -m trainer config SECTION` explains settings"


_NEAR = 0.75
_MOST = 3


def nearest(key: str, names: Iterable[str], handicaps: Iterable[float]) -> list[str]:
    """The nearest of the names; several if they are equally near, none if nothing is near.

    A handicap lowers the similarity of its name, from 0 to 1.
    """
    scores = {name: _similarity(key, name) - handicap for name, handicap in zip(names, handicaps, strict=True)}
    best = max(scores.values(), default=0.0)
    near = [name for name, score in scores.items() if score >= max(_NEAR, best - 0.01)]
    return sorted(near, key=lambda name: -scores[name])[:_MOST]


def _similarity(key: str, name: str) -> float:
    """From 0 to 1: of the whole names, or of their last parts together with their sections."""
    if name == key:
        return 1.0
    if name.endswith(f".{key}"):
        return 0.99
    (section, _, leaf), (other_section, _, other) = key.rpartition("."), name.rpartition(".")
    sections = _ratio(section, other_section) if section else 1.0
    words, others = leaf.split("_"), other.split("_")
    scores = [
        _ratio(key, name),
        (0.6 * _ratio(leaf, other) + 0.4 * sections) if section else 0.95 * _ratio(leaf, other),
    ]
    if leaf == other:  # the right name in the wrong section
        scores.append(0.8 + 0.15 * sections)
    elif len(leaf) > 1 and (leaf == "".join(word[:1] for word in others) or set(words) < set(others)):
        scores.append(0.73 + 0.2 * sections)  # lr is learning_rate, max_length a part of max_prompt_length
    return max(scores)


def _ratio(text: str, other: str) -> float:
    matcher = SequenceMatcher(None, text, other)
    return matcher.ratio() if matcher.real_quick_ratio() > 0.5 else 0.0
