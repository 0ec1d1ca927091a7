"""`KEY=VALUE` arguments: dotted keys, values typed by the config tree they change."""

import difflib
import json
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from trainer.compat.verl_keys import RULES, translate
from trainer.config.files import read_settings
from trainer.config.tree import Config
from trainer.errors import ConfigError

Settings = TypeVar("Settings", bound=BaseModel)


@dataclass(frozen=True)
class Setting:
    """One leaf of a config tree: its dotted key, expected type in words, default and description."""

    key: str
    expected: str
    default: Any
    description: str

    def paragraph(self) -> str:
        default = json.dumps(self.default, default=str)
        return f"{self.key}={default}  ({self.expected})\n    {self.description}".rstrip()


def settings(model: type[BaseModel], prefix: str = "") -> Iterator[Setting]:
    """Every leaf of a config tree, in the order of the classes."""
    for name, field in model.model_fields.items():
        section = _section(field)
        if section is not None:
            yield from settings(section, f"{prefix}{name}.")
        else:
            default = field.get_default(call_default_factory=True)
            yield Setting(prefix + name, _expected(field), default, field.description or "")


def load_config(files: Sequence[str], arguments: Sequence[str]) -> tuple[Config, list[str]]:
    """The settings of a run: presets or YAML files, later ones outranking earlier, changed by `KEY=VALUE` arguments.

    verl's keys are understood wherever ours are. Returns the config and what the user should know about keys of verl's
    that mean something else here or nothing. Raises ConfigError; see `parse_overrides`.
    """
    known = [setting.key for setting in settings(Config)]
    given: dict[str, str] = {}
    for file in files:
        given |= read_settings(file)
    given |= dict(split_argument(argument, known) for argument in arguments)
    translated, notes = translate(given, known)
    return build(Config, translated, [*known, *(key for key in RULES if "*" not in key)]), notes


def parse_overrides(arguments: Sequence[str], model: type[Settings] = Config) -> Settings:  # type: ignore[assignment]
    """A config with its defaults changed by `KEY=VALUE` arguments; of two for one key, the last one counts.

    Lists are written `[a,b]` or `a,b`, an unset value `null` or `none`; Hydra's `+KEY=VALUE` means the same as without
    the plus. Raises ConfigError for an argument without `=`, for an unknown key (the hint names the nearest one) and
    for values that do not fit their type.
    """
    known = [setting.key for setting in settings(model)]
    return build(model, dict(split_argument(argument, known) for argument in arguments), known)


def split_argument(argument: str, known: Sequence[str]) -> tuple[str, str]:
    """Key and value of `KEY=VALUE`, without the plus and the quotes that Hydra allows."""
    key, separator, text = argument.partition("=")
    if not separator:
        raise ConfigError(f"{argument}: not of the form KEY=VALUE", hint=_nearest(key, known))
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        text = text[1:-1]
    return key.lstrip("+"), text


def build(model: type[Settings], given: Mapping[str, str], suggestions: Sequence[str]) -> Settings:
    """A config from dotted keys; an unknown key's hint names the nearest of the suggestions. Raises ConfigError."""
    known = {setting.key: setting for setting in settings(model)}
    tree: dict[str, Any] = {}
    for key, text in given.items():
        if key not in known:
            raise ConfigError(f"{key}: there is no such setting", hint=_nearest(key, suggestions))
        *path, leaf = key.split(".")
        branch = tree
        for part in path:
            branch = branch.setdefault(part, {})
        branch[leaf] = _value(text, known[key].expected)
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(*_explain(error, given, known)) from error


def explain_settings(names: Sequence[str], model: type[BaseModel] = Config) -> list[str]:
    """A paragraph about each setting named, or about each of a section's: what it is, what it may be, its default.

    Raises ConfigError for a name that is neither.
    """
    known = {setting.key: setting for setting in settings(model)}
    paragraphs = []
    for name in names:
        keys = [key for key in known if key == name or key.startswith(f"{name}.")]
        if not keys:
            raise ConfigError(f"{name}: there is no such setting", hint=_nearest(name, list(known)))
        paragraphs += [known[key].paragraph() for key in keys]
    return paragraphs


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
    if origin in (Union, types.UnionType):
        return [kind for argument in arguments for kind in _kinds(argument)]
    if origin is Literal:
        return [" | ".join(str(argument) for argument in arguments)]
    if origin in (list, tuple):
        kind = _kinds(arguments[0])[0]
        return [f"list of {kind}" if get_origin(arguments[0]) is Literal else f"list of {kind}s"]
    names = {"int": "integer", "float": "number", "bool": "true or false", "str": "text", "NoneType": "null"}
    names["Pattern"] = "regular expression"
    return [names.get(annotation.__name__, annotation.__name__.lower())]


def _value(text: str, expected: str) -> Any:
    if text.lower() in ("null", "none") and expected.endswith(" or null"):
        return None
    if expected.startswith("list of "):
        inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
        return [item.strip().strip("\"'") for item in inner.split(",") if item.strip()]
    return text


def _nearest(key: str, known: Sequence[str]) -> str:
    key = key.lstrip("-+").replace("-", "_")
    section = [name for name in known if name.startswith(f"{key}.")]
    if section:
        return f"{key} is a section; its settings are {', '.join(section)}"
    # A right name in a wrong section is nearer than any whole key.
    leaf = key.rpartition(".")[2]
    same_leaf = [name for name in known if name.rpartition(".")[2] == leaf]
    near = same_leaf[:1] or difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if not near:
        leaves = {name.rpartition(".")[2]: name for name in known}
        near = [leaves[name] for name in difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.6)]
    return f"did you mean {near[0]}=VALUE?" if near else "`python -m trainer config SECTION` explains settings"


def _explain(error: ValidationError, given: Mapping[str, str], known: Mapping[str, Setting]) -> tuple[str, str]:
    """Message and hint for what pydantic found; settings that clash carry no key of their own."""
    problems: dict[str, str] = {}
    nearest: list[str] = []
    for detail in error.errors():
        key = ".".join(str(part) for part in detail["loc"])
        key = next((name for name in known if key == name or key.startswith(f"{name}.")), key)
        value = f"{key}={given[key]}" if key in given else key
        reason = f"expected {known[key].expected}" if key in known else detail["msg"].removeprefix("Value error, ")
        problems.setdefault(key, f"{value}: {reason}" if value else reason)
        if detail["type"] == "literal_error":
            choices = known[key].expected.removeprefix("list of ").removesuffix(" or null").split(" | ")
            near = difflib.get_close_matches(str(detail["input"]), choices, n=1)
            nearest += [f"did you mean {name}?" for name in near]
    described = [f"{key}: {known[key].description}" for key in problems if key in known and known[key].description]
    return "; ".join(problems.values()), "; ".join(
        [*nearest, *described]
    ) or "`python -m trainer config SECTION` explains settings"
