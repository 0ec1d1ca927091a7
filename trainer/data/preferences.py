"""Preference pairs: a preferred and a rejected response to the same prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config.data import DataConfig
from trainer.data.chat_template import with_system_prompt
from trainer.data.dataset import render_prompt
from trainer.data.files import read_rows
from trainer.data.messages import checked_text, text_messages
from trainer.data.subset import EVERY_ROW, Subset
from trainer.data.tools import read_tools
from trainer.errors import DataError

_HINT = "each row has prompt (a list of messages), chosen and rejected (text, or messages of which the last one counts)"


@dataclass(frozen=True)
class PreferencePair:
    """A prompt with the preferred and the rejected response, as tokens including the end token."""

    prompt: tuple[int, ...]
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]


def read_pairs(
    files: Sequence[Path], tokenizer: Any, settings: DataConfig, subset: Subset = EVERY_ROW
) -> list[PreferencePair]:
    """The pairs of files, or of a subset of their rows, in file order.

    Raises DataError if a file is missing, damaged or has other columns, or if a prompt or response exceeds
    `data.max_prompt_length` or `data.max_response_length`. With `data.overlong_prompts=filter` such pairs are dropped.
    """
    if not files:
        raise DataError("no files with preferences are given", hint="set data.train_files and data.validation_files")
    if tokenizer.eos_token_id is None:
        raise DataError(
            "the tokenizer has no end token, which every response needs", hint="set eos_token in tokenizer_config.json"
        )
    pairs, tools = [], read_tools(settings)
    found = [read_rows(file, (settings.prompt_key, "chosen", "rejected"), _HINT) for file in files]
    for file, rows, numbers in zip(files, found, subset.rows([len(rows) for rows in found]), strict=True):
        for number in numbers:
            pair = _pair(file, number, rows[number], tokenizer, settings, tools)
            too_long = _too_long(pair, settings)
            if too_long and settings.overlong_prompts != "filter":
                raise DataError(
                    f"{file}, row {number}: {too_long}", hint="raise it, or set data.overlong_prompts=filter"
                )
            if not too_long:
                pairs.append(pair)
    if not pairs:
        raise DataError(f"{', '.join(map(str, files))}: no pair is short enough", hint="raise data.max_response_length")
    return pairs


def _pair(
    file: Path, number: int, row: dict[str, Any], tokenizer: Any, settings: DataConfig, tools: Sequence[Any]
) -> PreferencePair:
    where = f"{file}, row {number}"
    messages = text_messages(where, settings.prompt_key, row[settings.prompt_key], _HINT)
    texts = [render_prompt(where, with_system_prompt(messages, settings), tokenizer, settings, tools)]
    for column in ("chosen", "rejected"):
        value = row[column]
        if not value:
            raise DataError(f"{where}: {column} is empty", hint=_HINT)
        text = text_messages(where, column, value, _HINT)[-1]["content"] if isinstance(value, list) else value
        texts.append(checked_text(f"{where}: {column}", text, _HINT))
    if texts[1] == texts[2]:
        raise DataError(f"{file}, row {number}: chosen and rejected are the same", hint="remove such rows")
    tokens = tokenizer(texts, add_special_tokens=False)["input_ids"]
    end = tokenizer.eos_token_id
    return PreferencePair(tuple(tokens[0]), (*tokens[1], end), (*tokens[2], end))


def _too_long(pair: PreferencePair, settings: DataConfig) -> str:
    response = max(len(pair.chosen), len(pair.rejected))
    if len(pair.prompt) > settings.max_prompt_length:
        return f"the prompt has {len(pair.prompt)} tokens, data.max_prompt_length is {settings.max_prompt_length}"
    if response > settings.max_response_length:
        return f"a response has {response} tokens, data.max_response_length is {settings.max_response_length}"
    return ""
