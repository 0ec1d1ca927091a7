"""Hydra's command line: `+KEY=VALUE`, `~KEY`, values as YAML, and `${...}` in values (https://hydra.cc, OmegaConf)."""

import os
import re
from collections.abc import Callable, Container, Mapping
from typing import Any

import yaml

from trainer.errors import ConfigError

_INTERPOLATION = re.compile(r"\$\{((?:[^${}]|\{\})*)\}")  # {} may be a default
_PAIR = re.compile(r"""([{,]\s*(?:[\w.-]+|"[^"]*"|'[^']*'))\s*:(?=[^\s/])""")
_DEPTH = 20

Lookup = Callable[[str], Any]
"""The value of a key; raises KeyError if there is none."""


def read_value(argument: str, text: str) -> Any:
    """A value without the quotes that Hydra allows. Lists, mappings and null are read as YAML.

    Any other value stays text, because only the setting's type can tell whether `1e-6` is a number and `007` a name.
    """
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        text = text[1:-1]
    if not text.startswith(("[", "{")) and text not in ("null", "~"):
        return text
    hint = "write a list as [a,b], a mapping as {a: 1}"
    return read_yaml(argument, _PAIR.sub(r"\1: ", text) if "{" in text else text, hint)  # Hydra reads {a:1} as {a: 1}


def read_yaml(where: str, text: str, hint: str) -> Any:
    """The value of a YAML text. Raises ConfigError if it is not YAML, or if a value contains itself."""
    try:
        document = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a number of thousands of digits
        raise ConfigError(f"{where}: not YAML: {error}", hint=hint) from error
    if _contains_itself(document, ()):
        raise ConfigError(f"{where}: a value contains itself through an alias (*name)", hint="write the value out")
    return document


def _contains_itself(value: Any, above: tuple[int, ...]) -> bool:
    if id(value) in above:
        return True
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(_contains_itself(part, (*above, id(value))) for part in parts)


def remove(key: str, given: dict[str, Any]) -> None:
    """Drops what was given for a key and for settings below it: Hydra's `~KEY`.

    Raises ConfigError if nothing was given, because a setting cannot be absent here.
    """
    removed = [name for name in given if name == key or name.startswith(f"{key}.")]
    if not removed:
        raise ConfigError(f"~{key}: no file or argument before it sets {key}", hint=f"leave it out, or set {key}=null")
    for name in removed:
        del given[name]


def flattened(key: str, value: Any, whole: Container[str] = ()) -> dict[str, Any]:
    """A mapping below a key, "" at the root, as one entry per leaf, with dotted keys.

    Settings in `whole` take their mapping as it is.
    """
    if not isinstance(value, Mapping) or key in whole or (key and not value):
        return {key: value}
    parts = [flattened(f"{key}.{inner}" if key else str(inner), below, whole) for inner, below in value.items()]
    return {name: leaf for part in parts for name, leaf in part.items()}


def interpolated(key: str, value: Any, lookup: Lookup, depth: int = 0) -> Any:
    """A value with its `${...}` replaced: another key, `oc.env:NAME,default`, `oc.select:KEY,default`.

    A value that is nothing but one interpolation keeps the type of what it names. Raises ConfigError for a name that
    has no value.
    """
    if isinstance(value, list):
        return [interpolated(key, item, lookup, depth) for item in value]
    if isinstance(value, dict):
        return {name: interpolated(key, item, lookup, depth) for name, item in value.items()}
    while isinstance(value, str) and (match := _INTERPOLATION.search(value)):
        if depth > _DEPTH:
            raise ConfigError(f"{key}={value}: interpolations refer to each other", hint="write the value itself")
        resolved = _resolve(key, match[1], lookup, depth)
        if match[0] == value:
            return interpolated(key, resolved, lookup, depth + 1)
        shown = "null" if resolved is None else str(resolved)
        value = value[: match.start()] + shown + value[match.end() :]
        depth += 1
    return value


def _resolve(key: str, expression: str, lookup: Lookup, depth: int) -> Any:
    resolver, _, rest = expression.partition(":")
    if resolver == "oc.env":
        name, separator, default = (part.strip() for part in rest.partition(","))
        if not separator and name not in os.environ:
            raise ConfigError(f"{key}: the environment variable {name} is not set", hint=f"export {name}=VALUE")
        return os.environ.get(name, read_value(expression, default))
    name, separator, default = rest.partition(",") if resolver == "oc.select" else (expression, "", "")
    name = name.strip()
    if name.startswith("."):
        levels = len(name) - len(name.lstrip("."))
        name = ".".join([*key.split(".")[:-levels], name.lstrip(".")])
    try:
        return interpolated(name, lookup(name), lookup, depth + 1)
    except KeyError as error:
        if resolver == "oc.select":
            return read_value(expression, default.strip()) if separator else None
        raise ConfigError(
            f"{key}: ${{{expression}}} names no setting", hint="write the value, ${oc.env:NAME}, or a key that exists"
        ) from error
