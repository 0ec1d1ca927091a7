"""Demonstrations for supervised fine-tuning: a response to a prompt, or a conversation."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from trainer.config.sections.data import DataConfig
from trainer.config.sft import SftSettings
from trainer.data.formats.chat_template import conversation_text, with_system_prompt
from trainer.data.formats.files import read_rows
from trainer.data.formats.messages import Messages, checked_text, text_messages
from trainer.data.formats.tools import checked_tools, read_tools
from trainer.data.subset import EVERY_ROW, Subset
from trainer.errors import DataError

_HINT = (
    "a row has a prompt (data.prompt_key: text or messages) and its response (sft.response_key), or with "
    "sft.messages_key a conversation"
)


@dataclass(frozen=True)
class Demonstration:
    """Tokens of a row up to the first that is learned, the tokens from there on, and which of those are learned.

    The last one is.
    """

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    learned: tuple[bool, ...]


@dataclass(frozen=True)
class Part:
    """A text of a row, and whether it is learned."""

    text: str
    learned: bool


def read_demonstrations(
    files: Sequence[Path], tokenizer: Any, settings: DataConfig, sft: SftSettings, subset: Subset = EVERY_ROW
) -> list[Demonstration]:
    """The demonstrations of files, or of a subset of their rows, in file order; none without files.

    A row's own columns `tools` and `enable_thinking` go to its chat template. `data.overlong_prompts` applies to rows
    with more than `sft.max_length` tokens. Raises DataError if a file is
    missing or damaged, if a row has no text to learn, or if it is too long.
    """
    if sft.messages_key is None and tokenizer.eos_token_id is None:
        raise DataError(
            "the tokenizer has no end token, which every response needs", hint="set eos_token in tokenizer_config.json"
        )
    keys = [sft.messages_key] if sft.messages_key else [settings.prompt_key, sft.response_key]
    columns = list(dict.fromkeys(key.partition(".")[0] for key in keys))
    found = [read_rows(file, columns, _HINT, ("tools", "enable_thinking")) for file in files]
    writer, examples = _Writer(tokenizer, settings, sft, read_tools(settings)), []
    for file, rows, numbers in zip(files, found, subset.rows([len(rows) for rows in found]), strict=True):
        for number in numbers:
            where = f"{file}, row {number}"
            example = writer.demonstration(where, writer.parts(where, rows[number]))
            if example is not None:
                examples.append(example)
    if files and not examples:
        raise DataError(f"{', '.join(map(str, files))}: no row is short enough", hint="raise sft.max_length")
    return examples


@dataclass(frozen=True)
class _Writer:
    """Turns rows into tokens."""

    tokenizer: Any
    settings: DataConfig
    sft: SftSettings
    tools: Sequence[Any]

    def parts(self, where: str, row: Mapping[str, Any]) -> list[Part]:
        """The texts of a row, each of them tokenized by itself."""
        tools = checked_tools(where, row["tools"]) if row["tools"] else self.tools
        if row["enable_thinking"] is not None:
            thinking = {**self.settings.chat_template_kwargs, "enable_thinking": bool(row["enable_thinking"])}
            settings = self.settings.model_copy(update={"chat_template_kwargs": thinking})
            return replace(self, settings=settings).parts(where, {**row, "enable_thinking": None})
        if self.sft.messages_key:
            messages = self._messages(where, self.sft.messages_key, row)
            return list(self._turns(where, messages, tools))
        value = _value(where, row, self.sft.response_key)
        if isinstance(value, list) and value:
            value = text_messages(where, self.sft.response_key, value, _HINT)[-1]["content"]
        response = checked_text(f"{where}: {self.sft.response_key}", value, _HINT)
        prompt = self._render(where, self._messages(where, self.settings.prompt_key, row), tools)
        return [Part(prompt, False), Part(response, True)]

    def demonstration(self, where: str, parts: Sequence[Part]) -> Demonstration | None:
        """The row as tokens; None if it is too long and `data.overlong_prompts=filter`."""
        tokens, learned = [], []
        for part in parts:
            own = self.tokenizer(part.text, add_special_tokens=False)["input_ids"]
            if part.learned and not self.sft.messages_key:
                own = [*own, self.tokenizer.eos_token_id]
            tokens += own
            learned += [part.learned] * len(own)
        longest, way = self.sft.max_length, self.settings.overlong_prompts
        if len(tokens) > longest:
            if way == "filter":
                return None
            if way == "error":
                raise DataError(
                    f"{where}: the row has {len(tokens)} tokens, sft.max_length is {longest}",
                    hint="raise it, or set data.overlong_prompts=filter",
                )
            kept = slice(-longest, None) if way == "truncate_left" else slice(longest)
            tokens, learned = tokens[kept], learned[kept]
        if True not in learned[1:]:  # the first token has nothing before it that predicts it
            raise DataError(f"{where}: no token is left to learn", hint="raise sft.max_length, or remove such rows")
        first = max(1, learned.index(True))
        end = len(learned) - learned[::-1].index(True)
        return Demonstration(tuple(tokens[:first]), tuple(tokens[first:end]), tuple(learned[first:end]))

    def _messages(self, where: str, key: str, row: Mapping[str, Any]) -> Messages:
        value = _value(where, row, key)
        if isinstance(value, str):
            value = [{"role": "user", "content": value}]
        messages = text_messages(where, key, value, _HINT)
        if not messages:
            raise DataError(f"{where}: {key} is empty", hint=_HINT)
        return with_system_prompt(messages, self.settings)

    def _turns(self, where: str, messages: Messages, tools: Sequence[Any]) -> Iterator[Part]:
        """The texts between and in the messages of the assistant."""
        written = ""
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            opened = self._render(where, messages[:number], tools)
            closed = self._render(where, messages[: number + 1], tools, opening=False)
            if not opened.startswith(written) or not closed.startswith(opened):
                raise DataError(
                    f"{where}: message {number} of {self.sft.messages_key}: the chat template writes it, or messages "
                    "before it, differently as the conversation goes on",
                    hint="set data.chat_template to one that only appends, or data.chat_template_kwargs (like "
                    "enable_thinking), or give prompts and responses",
                )
            yield Part(opened.removeprefix(written), False)
            yield Part(closed.removeprefix(opened), True)
            written = closed

    def _render(self, where: str, messages: Messages, tools: Sequence[Any], opening: bool = True) -> str:
        try:
            return conversation_text(messages, self.tokenizer, self.settings, tools, opening)
        except (TemplateError, ValueError) as error:
            raise DataError(
                f"{where}: the model's chat template rejects these messages: {error}",
                hint="set data.chat_template to a template that accepts them, or change the roles of the messages",
            ) from error


def _value(where: str, row: Mapping[str, Any], key: str) -> Any:
    """The value under a key; a dot enters a mapping. Raises DataError."""
    value: Any = row
    for name in key.split("."):
        if not isinstance(value, Mapping) or value.get(name) is None:
            raise DataError(f"{where}: no {key}", hint=_HINT)
        value = value[name]
    return value
