"""The tools of a run: what the chat template says about them, and the classes that run them."""

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from trainer.config.custom_code import import_from_here
from trainer.config.sections.data import DataConfig
from trainer.data.formats.tool_schema import OpenAIFunctionToolSchema
from trainer.errors import ConfigError, DataError

_LIST = "tools are a list of mappings, each with a name or a function; or a YAML mapping with the key tools"


@dataclass(frozen=True)
class ToolEntry:
    """One tool of `data.tools_file`.

    Tools that run have a class: the name of one in trainer/experience/tools/, or the import path of the user's.
    `schema` is what the chat template gets; None leaves it to the class.
    """

    where: str
    schema: Mapping[str, Any] | None
    class_name: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)


def read_tools(settings: DataConfig) -> list[Any]:
    """The schemas of `data.tools_file` for the chat template; empty without one. Raises DataError or ConfigError."""
    return [schema_of(entry) for entry in read_entries(settings)]


def read_entries(settings: DataConfig) -> list[ToolEntry]:
    """The tools of `data.tools_file`; empty without one.

    A JSON file holds a list of schemas. A YAML file holds `tools`: entries with `class_name`, `config` and
    `tool_schema`. Raises DataError.
    """
    if settings.tools_file is None:
        return []
    where = f"data.tools_file={settings.tools_file}"
    document = read_yaml(where, settings.tools_file)
    if not isinstance(document, dict):
        return [ToolEntry(where, schema) for schema in checked_tools(where, document)]
    entries = document.get("tools")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise DataError(f"{where}: tools is not a list of mappings", hint=_LIST)
    return [_entry(f"{where}: tool {number}", entry) for number, entry in enumerate(entries)]


def schema_of(entry: ToolEntry) -> Any:
    """The schema for the chat template. Raises ConfigError if neither the entry nor its class has one."""
    if entry.schema is not None:
        return entry.schema
    assert entry.class_name is not None
    return schema_of_tool(load_class(entry.where, entry.class_name)(dict(entry.config), None))


def schema_of_tool(tool: Any) -> dict[str, Any]:
    """The schema of a tool instance, without unset fields."""
    return dict(tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True))


@cache
def load_class(where: str, name: str) -> Callable[..., Any]:
    """The class at an import path, like `package.module.Class`. The working directory may hold the package.

    Raises ConfigError, which begins with `where`.
    """
    module, _, attribute = name.rpartition(".")
    if not module:
        raise ConfigError(f"{where}: {name} is no import path", hint="name a class as package.module.Class")
    import_from_here()
    try:
        loaded = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # the user's module may raise anything
        raise ConfigError(
            f"{where}: {name} cannot be imported: {type(error).__name__}: {error}",
            hint="start in the directory that holds the package, or put it on PYTHONPATH",
        ) from error
    return loaded  # type: ignore[no-any-return]


def read_yaml(where: str, path: Path) -> Any:
    """The value of a YAML or JSON file. Raises DataError, which begins with `where`."""
    try:
        text = path.read_text(encoding="utf-8")
        return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise DataError(f"{where}: cannot be read: {error}", hint=_LIST) from error
    except (ValueError, yaml.YAMLError) as error:
        raise DataError(f"{where}: neither YAML nor JSON: {error}", hint=_LIST) from error


def _entry(where: str, entry: Mapping[str, Any]) -> ToolEntry:
    unknown = entry.keys() - {"class_name", "config", "tool_schema", "mcp"}
    name, config, schema = entry.get("class_name"), entry.get("config") or {}, entry.get("tool_schema")
    if unknown or not isinstance(name, str) or not isinstance(config, dict):
        problem = f"does not know {', '.join(sorted(unknown))}" if unknown else "needs class_name and config"
        raise DataError(f"{where} {problem}", hint="an entry has class_name, config and tool_schema")
    if schema is not None:
        try:
            checked = OpenAIFunctionToolSchema.model_validate(schema)
        except ValueError as error:
            raise DataError(f"{where}: tool_schema: {error}", hint="write it as OpenAI's functions are") from error
        schema = checked.model_dump(exclude_unset=True, exclude_none=True)
    return ToolEntry(where, schema, name, config)


def checked_tools(where: str, value: Any) -> list[Any]:
    """The tools of a row or file: a list, or its JSON text; null values in mappings, which Parquet adds, are left out.

    Raises DataError.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise DataError(f"{where}: the tools are no JSON: {error}", hint=_LIST) from error
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DataError(f"{where}: the tools are not a list of mappings", hint=_LIST)
    return [without_nulls(tool) for tool in value]


def selected(tools: Sequence[Any], names: Sequence[str] | None) -> list[Any]:
    """The tools with these names, in their order; all without names."""
    return [tool for name in names for tool in tools if _name(tool) == name] if names else list(tools)


def _name(tool: Mapping[str, Any]) -> Any:
    return tool.get("function", tool).get("name")


def without_nulls(value: Any) -> Any:
    """The value without nulls in mappings: Parquet gives every row the fields of all rows."""
    if isinstance(value, dict):
        return {name: without_nulls(part) for name, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value
