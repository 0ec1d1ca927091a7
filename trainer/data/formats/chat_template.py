"""Messages as a model's chat template writes them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.config.sections.data import DataConfig
from trainer.errors import ConfigError


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

    Raises jinja2.TemplateError or ValueError if the template fails, or if the text is not valid Unicode.
    """
    try:
        text = str(
            tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=opening,
                **settings.chat_template_kwargs,
            )
        )
    except (TypeError, AttributeError, LookupError, RecursionError) as error:  # of the template's own expressions
        raise ValueError(f"{type(error).__name__}: {error}") from error
    text.encode()  # a tokenizer would call a lone surrogate a wrong type
    return text


def with_system_prompt(messages: list[dict[str, Any]], settings: DataConfig) -> list[dict[str, Any]]:
    """The messages, after `data.system_prompt` if they start without a system message."""
    if settings.system_prompt is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": settings.system_prompt}, *messages]
