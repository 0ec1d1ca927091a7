"""Renders messages with a model's chat template."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from trainer.config.sections.data import DataConfig
from trainer.errors import ConfigError, DataError

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

Written = TypeVar("Written")


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

    Arguments of tool calls that are JSON in a text, as in OpenAI's format, reach the template as mappings: it would
    write the text as JSON once more. A template that joins the text itself gets them as they are.

    Raises jinja2.TemplateError or ValueError if the template fails, or if the text is not valid Unicode.
    """

    def write(given: Sequence[Mapping[str, Any]]) -> str:
        return str(
            tokenizer.apply_chat_template(
                list(given),
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=opening,
                **settings.chat_template_kwargs,
            )
        )

    text = _written(messages, write)
    text.encode()  # a tokenizer would call a lone surrogate a wrong type
    return text


def marked_spans(
    messages: Sequence[Mapping[str, Any]], tokenizer: Any, settings: DataConfig, tools: Sequence[Any] | None
) -> list[tuple[int, int]] | None:
    """Beginnings and ends in `conversation_text` of what the template marks with `{% generation %}`, as Transformers
    defines it; None if it marks nothing in any conversation. Raises as `conversation_text` does."""
    template = tokenizer.get_chat_template(None, list(tools) if tools else None)
    if not _GENERATION.search(template):
        return None

    def write(given: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
        _, (spans,) = render_jinja_template(
            [list(given)],
            tools=list(tools) if tools else None,
            chat_template=template,
            return_assistant_tokens_mask=True,
            **{**tokenizer.special_tokens_map, **settings.chat_template_kwargs},
        )
        return [(int(start), int(end)) for start, end in spans]

    return _written(messages, write)


def checked_conversation_text(
    where: str,
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    settings: DataConfig,
    tools: Sequence[Any],
    opening: bool = True,
) -> str:
    """`conversation_text` of a row. Raises DataError, which begins with `where`."""
    try:
        return conversation_text(messages, tokenizer, settings, tools, opening)
    except (TemplateError, ValueError) as error:
        raise DataError(
            f"{where}: the model's chat template rejects these messages: {error}",
            hint="set data.chat_template to a template that accepts them, or change the roles of the messages",
        ) from error


def with_system_prompt(messages: list[dict[str, Any]], settings: DataConfig) -> list[dict[str, Any]]:
    """The messages, after `data.system_prompt` if they start without a system message."""
    if settings.system_prompt is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": settings.system_prompt}, *messages]


def _written(messages: Sequence[Mapping[str, Any]], write: Callable[[Sequence[Mapping[str, Any]]], Written]) -> Written:
    parsed = [_with_mappings(message) for message in messages]
    try:
        try:
            return write(parsed)
        except TypeError:
            if parsed == list(messages):
                raise
            return write(messages)
    except (TypeError, AttributeError, LookupError, RecursionError) as error:  # of the template's own expressions
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _with_mappings(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with the arguments of its calls as mappings."""
    calls = message.get("tool_calls")
    if not isinstance(calls, Sequence) or not all(isinstance(call, Mapping) for call in calls):
        return message
    return {**message, "tool_calls": [_with_mapping(call) for call in calls]} if calls else message


def _with_mapping(call: Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_mapping(call["function"])}
    try:
        arguments = json.loads(call["arguments"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return call
    return {**call, "arguments": arguments} if isinstance(arguments, Mapping) else call
