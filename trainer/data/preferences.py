"""Preferences: pairs of a preferred and a rejected response to a prompt, or single responses with a label."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from trainer.config.sections.data import DataConfig
from trainer.data.dataset import render_prompt
from trainer.data.formats.chat_template import with_system_prompt
from trainer.data.formats.files import read_rows
from trainer.data.formats.messages import checked_text, text_messages
from trainer.data.formats.tools import read_tools
from trainer.data.subset import EVERY_ROW, Subset
from trainer.errors import DataError

_RESPONSE = "(text, or messages of which the last one counts)"
_HINTS = {
    ("chosen", "rejected"): f"each row has prompt (a list of messages), chosen and rejected {_RESPONSE}",
    ("completion", "label"): f"each row has prompt (a list of messages), completion {_RESPONSE} and label (true if it "
    "is desirable)",
}


@dataclass(frozen=True)
class PreferencePair:
    """A prompt with the preferred and the rejected response, as tokens including the end token."""

    prompt: tuple[int, ...]
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]

    @property
    def responses(self) -> tuple[tuple[int, ...], ...]:
        return self.chosen, self.rejected


@dataclass(frozen=True)
class LabelledResponse:
    """A prompt with a response as tokens, including the end token, and whether the response is desirable."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    desirable: bool

    @property
    def responses(self) -> tuple[tuple[int, ...], ...]:
        return (self.response,)


Example = TypeVar("Example", PreferencePair, LabelledResponse)


def read_pairs(
    files: Sequence[Path], tokenizer: Any, settings: DataConfig, subset: Subset = EVERY_ROW
) -> list[PreferencePair]:
    """The pairs of files, or of a subset of their rows, in file order.

    Raises DataError if a file is missing, damaged or has other columns, or if a prompt or response exceeds
    `data.max_prompt_length` or `data.max_response_length`. With `data.overlong_prompts=filter` such pairs are dropped.
    """
    return _read(files, tokenizer, settings, subset, ("chosen", "rejected"), _pair)


def read_labelled(
    files: Sequence[Path], tokenizer: Any, settings: DataConfig, subset: Subset = EVERY_ROW
) -> list[LabelledResponse]:
    """The labelled responses of files; see `read_pairs`. Raises DataError as well if all have the same label."""
    found = _read(files, tokenizer, settings, subset, ("completion", "label"), _labelled)
    if len({example.desirable for example in found}) == 1:
        raise DataError(
            f"{', '.join(map(str, files))}: every label is {str(found[0].desirable).lower()}",
            hint="KTO learns from desirable and undesirable responses",
        )
    return found


def _read(
    files: Sequence[Path],
    tokenizer: Any,
    settings: DataConfig,
    subset: Subset,
    columns: tuple[str, str],
    convert: Callable[[str, dict[str, Any], _Writer], Example],
) -> list[Example]:
    if tokenizer.eos_token_id is None:
        raise DataError(
            "the tokenizer has no end token, which every response needs", hint="set eos_token in tokenizer_config.json"
        )
    hint, examples = _HINTS[columns], []
    writer = _Writer(tokenizer, settings, read_tools(settings), hint)
    found = [read_rows(file, (settings.prompt_key, *columns), hint) for file in files]
    for file, rows, numbers in zip(files, found, subset.rows([len(rows) for rows in found]), strict=True):
        for number in numbers:
            where = f"{file}, row {number}"
            example = convert(where, rows[number], writer)
            too_long = _too_long(example, settings)
            if too_long and settings.overlong_prompts != "filter":
                raise DataError(f"{where}: {too_long}", hint="raise it, or set data.overlong_prompts=filter")
            if not too_long:
                examples.append(example)
    if not examples:
        raise DataError(f"{', '.join(map(str, files))}: no row is short enough", hint="raise data.max_response_length")
    return examples


@dataclass(frozen=True)
class _Writer:
    """Turns the texts of a row into tokens."""

    tokenizer: Any
    settings: DataConfig
    tools: Sequence[Any]
    hint: str

    def prompt(self, where: str, row: dict[str, Any]) -> tuple[int, ...]:
        key = self.settings.prompt_key
        messages = with_system_prompt(text_messages(where, key, row[key], self.hint), self.settings)
        return self._tokens(render_prompt(where, messages, self.tokenizer, self.settings, self.tools))

    def response(self, where: str, row: dict[str, Any], column: str) -> tuple[int, ...]:
        """The tokens of a text, or of the last of several messages, and the end token."""
        value = row[column]
        if not value:
            raise DataError(f"{where}: {column} is empty", hint=self.hint)
        text = text_messages(where, column, value, self.hint)[-1]["content"] if isinstance(value, list) else value
        return (*self._tokens(checked_text(f"{where}: {column}", text, self.hint)), self.tokenizer.eos_token_id)

    def _tokens(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def _pair(where: str, row: dict[str, Any], writer: _Writer) -> PreferencePair:
    pair = PreferencePair(
        writer.prompt(where, row), writer.response(where, row, "chosen"), writer.response(where, row, "rejected")
    )
    if pair.chosen == pair.rejected:
        raise DataError(f"{where}: chosen and rejected are the same", hint="remove such rows")
    return pair


def _labelled(where: str, row: dict[str, Any], writer: _Writer) -> LabelledResponse:
    if not isinstance(row["label"], bool):
        raise DataError(f"{where}: label is {row['label']!r} instead of true or false", hint=writer.hint)
    return LabelledResponse(writer.prompt(where, row), writer.response(where, row, "completion"), row["label"])


def _too_long(example: PreferencePair | LabelledResponse, settings: DataConfig) -> str:
    response = max(len(response) for response in example.responses)
    if len(example.prompt) > settings.max_prompt_length:
        return f"the prompt has {len(example.prompt)} tokens, data.max_prompt_length is {settings.max_prompt_length}"
    if response > settings.max_response_length:
        return f"a response has {response} tokens, data.max_response_length is {settings.max_response_length}"
    return ""
