"""The chat-style Parquet format of verl's preprocessing: its rows, and writing them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import pyarrow as pa
import pyarrow.parquet as pq

from trainer.errors import DataError
from trainer.records.files.atomic import atomic_file


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
