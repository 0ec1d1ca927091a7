"""Preferences: pairs of a preferred and a rejected response to a prompt, or single responses with a label."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from trainer.config.sections.data import DataConfig
from trainer.data.completions import OPTIONAL, Completion, CompletionReader
from trainer.data.formats.files import column_of, read_rows
from trainer.data.subset import EVERY_ROW, Subset
from trainer.errors import DataError

_HINTS = {
    ("chosen", "rejected"): "each row has prompt, chosen and rejected, each text or messages",
    ("completion", "label"): "each row has prompt and completion, each text or messages, and label (true if it is "
    "desirable)",
}


@dataclass(frozen=True)
class PreferencePair:
    """The preferred and the rejected response to a prompt."""

    chosen: Completion
    rejected: Completion

    @property
    def completions(self) -> tuple[Completion, ...]:
        return self.chosen, self.rejected


@dataclass(frozen=True)
class LabelledResponse:
    """A response to a prompt, and whether it is desirable."""

    completion: Completion
    desirable: bool

    @property
    def completions(self) -> tuple[Completion, ...]:
        return (self.completion,)


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
    examples = _read(files, tokenizer, settings, subset, ("completion", "label"), _labelled)
    if len({example.desirable for example in examples}) == 1:
        raise DataError(
            f"{', '.join(map(str, files))}: every label is {str(examples[0].desirable).lower()}",
            hint="KTO learns from desirable and undesirable responses",
        )
    return examples


def _read(
    files: Sequence[Path],
    tokenizer: Any,
    settings: DataConfig,
    subset: Subset,
    columns: tuple[str, str],
    convert: Callable[[str, dict[str, Any], CompletionReader], Example],
) -> list[Example]:
    hint, examples = _HINTS[columns], []
    reader = CompletionReader(tokenizer, settings, hint)
    tables = [read_rows(file, (column_of(settings.prompt_key), *columns), hint, OPTIONAL) for file in files]
    for file, rows, numbers in zip(files, tables, subset.rows([len(rows) for rows in tables]), strict=True):
        for number in numbers:
            where = f"{file}, row {number}"
            example = convert(where, rows[number], reader)
            too_long = _too_long(example, settings)
            if too_long and settings.overlong_prompts != "filter":
                raise DataError(f"{where}: {too_long}", hint="raise it, or set data.overlong_prompts=filter")
            if not too_long:
                examples.append(example)
    if not examples:
        raise DataError(f"{', '.join(map(str, files))}: no row is short enough", hint="raise data.max_response_length")
    return examples


def _pair(where: str, row: dict[str, Any], reader: CompletionReader) -> PreferencePair:
    chosen, rejected = (reader.response(where, row, key).completion(where) for key in ("chosen", "rejected"))
    if chosen == rejected:
        raise DataError(f"{where}: chosen and rejected are the same", hint="remove such rows")
    return PreferencePair(chosen, rejected)


def _labelled(where: str, row: dict[str, Any], reader: CompletionReader) -> LabelledResponse:
    if not isinstance(row["label"], bool):
        hint = _HINTS["completion", "label"]
        raise DataError(f"{where}: label is {row['label']!r} instead of true or false", hint=hint)
    return LabelledResponse(reader.response(where, row, "completion").completion(where), row["label"])


def _too_long(example: PreferencePair | LabelledResponse, settings: DataConfig) -> str:
    prompt = max(len(completion.prompt) for completion in example.completions)
    response = max(len(completion.response) for completion in example.completions)
    if prompt > settings.max_prompt_length:
        return f"the prompt has {prompt} tokens, data.max_prompt_length is {settings.max_prompt_length}"
    if response > settings.max_response_length:
        return f"a response has {response} tokens, data.max_response_length is {settings.max_response_length}"
    return ""
