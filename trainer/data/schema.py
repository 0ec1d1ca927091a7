"""The chat-style Parquet format of verl's preprocessing: its rows, writing and reading."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import pyarrow as pa
import pyarrow.parquet as pq

from trainer.errors import DataError
from trainer.records.atomic import atomic_file


class Message(TypedDict):
    role: str
    content: str


class GroundTruth(TypedDict):
    style: str
    ground_truth: str


class ExtraInfo(TypedDict):
    split: str
    index: int
    question: str
    answer: str


class PromptRow(TypedDict):
    data_source: str
    prompt: list[Message]
    ability: str
    reward_model: GroundTruth
    extra_info: ExtraInfo


_TEXT = pa.string()
SCHEMA = pa.schema(
    {
        "data_source": _TEXT,
        "prompt": pa.list_(pa.struct({"role": _TEXT, "content": _TEXT})),
        "ability": _TEXT,
        "reward_model": pa.struct({"style": _TEXT, "ground_truth": _TEXT}),
        "extra_info": pa.struct({"split": _TEXT, "index": pa.int64(), "question": _TEXT, "answer": _TEXT}),
    }
)


def write_rows(rows: Sequence[PromptRow], path: Path) -> None:
    """Writes rows to a Parquet file atomically. Raises DataError if the file cannot be written."""
    write_table(rows, path, SCHEMA)


def write_table(rows: Sequence[Mapping[str, Any]], path: Path, schema: pa.Schema | None = None) -> None:
    """Writes rows of any schema; see `write_rows`."""
    try:
        with atomic_file(path) as temporary:
            pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), temporary)
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error}", hint="name a directory that you can write to") from error


def read_parquet(path: Path, columns: Sequence[str], hint: str) -> list[dict[str, Any]]:
    """The rows of a Parquet file, with these columns only.

    Raises DataError with `hint` if the file is missing, not Parquet or empty, or if it lacks a column.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file", hint=hint)
    try:
        with pq.ParquetFile(path, memory_map=True) as file:
            missing = [column for column in columns if column not in file.schema_arrow.names]
            if missing:
                found = ", ".join(file.schema_arrow.names) or "none"
                raise DataError(f"{path}: no column {', '.join(missing)}; the file has {found}", hint=hint)
            rows: list[dict[str, Any]] = file.read(columns=list(columns)).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable parquet file: {error}", hint=hint) from error
    if not rows:
        raise DataError(f"{path}: the file has no rows", hint=hint)
    return rows
