"""Demonstrations for supervised fine-tuning: a response to a prompt, or a conversation."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.config.sections.data import DataConfig
from trainer.config.sft import SftSettings
from trainer.data.completions import OPTIONAL, Completion, CompletionReader, Tokens
from trainer.data.formats.files import column_of, read_rows
from trainer.data.subset import EVERY_ROW, Subset
from trainer.errors import DataError

_HINT = (
    "a row has a prompt (data.prompt_key) and its response (sft.response_key), each text or messages, or with "
    "sft.messages_key a conversation"
)


def read_demonstrations(
    files: Sequence[Path], tokenizer: Any, settings: DataConfig, sft: SftSettings, subset: Subset = EVERY_ROW
) -> list[Completion]:
    """The demonstrations of files, or of a subset of their rows, in file order; none without files.

    `data.overlong_prompts` applies to rows with more than `sft.max_length` tokens. Raises DataError if a file is
    missing or damaged, if a row has no text to learn, or if it is too long.
    """
    keys = [sft.messages_key] if sft.messages_key else [settings.prompt_key, sft.response_key]
    columns = list(dict.fromkeys(map(column_of, keys)))
    tables = [read_rows(file, columns, _HINT, OPTIONAL) for file in files]
    reader, examples = CompletionReader(tokenizer, settings, _HINT), []
    for file, rows, numbers in zip(files, tables, subset.rows([len(rows) for rows in tables]), strict=True):
        for number in numbers:
            where, row = f"{file}, row {number}", rows[number]
            if sft.messages_key:
                tokens = reader.conversation(where, row, sft.messages_key)
            else:
                tokens = reader.response(where, row, sft.response_key)
            example = _fitted(where, tokens, sft.max_length, settings.overlong_prompts)
            if example is not None:
                examples.append(example)
    if files and not examples:
        raise DataError(f"{', '.join(map(str, files))}: no row is short enough", hint="raise sft.max_length")
    return examples


def _fitted(where: str, tokens: Tokens, longest: int, way: str) -> Completion | None:
    """The row with at most `longest` tokens; None if it has more and is to be filtered."""
    count = len(tokens.token_ids)
    if count <= longest:
        return tokens.completion(where)
    if way == "filter":
        return None
    if way == "error":
        raise DataError(
            f"{where}: the row has {count} tokens, sft.max_length is {longest}",
            hint="raise it, or set data.overlong_prompts=filter",
        )
    return tokens.completion(where, slice(-longest, None) if way == "truncate_left" else slice(longest))
