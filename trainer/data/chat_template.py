"""Messages as a model's chat template writes them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.config.data import DataConfig
from trainer.errors import ConfigError, DataError

_LIST = "tools are a JSON list of mappings, each with a name or a function"


def use_chat_template(tokenizer: Any, settings: DataConfig) -> Any:
    """The tokenizer, with `data.chat_template` in place of its own if that is set. Raises ConfigError."""
    given = settings.chat_template
    if given is None:
        return tokenizer
    if "{{" not in given and "{%" not in given:
        file = Path(given).expanduser()
        try:
            given = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"data.chat_template={given}: neither a Jinja template nor a readable file: {error}",
                hint="name a file with the template, or give its text",
            ) from error
    tokenizer.chat_template = given
    return tokenizer


def conversation_text(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    settings: DataConfig,
    tools: Sequence[Any] | None = None,
    opening: bool = True,
) -> str:
    """The messages as text, with the opening of the model's turn after them unless `opening` is False.

    Raises what the template raises: jinja2.TemplateError or ValueError.
    """
    return str(
        tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) if tools else None,
            tokenize=False,
            add_generation_prompt=opening,
            **settings.chat_template_kwargs,
        )
    )


def with_system_prompt(messages: list[dict[str, Any]], settings: DataConfig) -> list[dict[str, Any]]:
    """The messages, after `data.system_prompt` if they start without a system message."""
    if settings.system_prompt is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": settings.system_prompt}, *messages]


def read_tools(settings: DataConfig) -> list[Any]:
    """The tools of `data.tools_file`; empty without one. Raises DataError."""
    if settings.tools_file is None:
        return []
    try:
        text = settings.tools_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"data.tools_file={settings.tools_file}: cannot be read: {error}", hint=_LIST) from error
    return checked_tools(f"data.tools_file={settings.tools_file}", text)


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
    return [_without_nulls(tool) for tool in value]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value
