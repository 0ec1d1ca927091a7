"""Rows of data files: Parquet, JSON Lines, JSON, and folders written by `datasets.Dataset.save_to_disk`."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trainer.errors import DataError

Rows = list[dict[str, Any]]

_SPLITS, _STATE = "dataset_dict.json", "state.json"  # of a datasets folder


class MissingColumnError(DataError):
    """A file lacks the columns `missing` and has those in `present`."""

    def __init__(self, message: str, hint: str, missing: Sequence[str], present: Sequence[str]) -> None:
        super().__init__(message, hint=hint)
        self.missing, self.present = tuple(missing), tuple(present)


@dataclass(frozen=True)
class _Wanted:
    """The columns to read, and the hint for files without them."""

    columns: Sequence[str]
    optional: Sequence[str]
    hint: str

    def among(self, where: str, names: Sequence[str]) -> list[str]:
        """Those that exist. Raises DataError if a required one does not."""
        missing = [column for column in self.columns if column not in names]
        if missing:
            columns = ", ".join(names) or "none"
            message = f"{where}: no column {', '.join(missing)}; the file has {columns}"
            raise MissingColumnError(message, self.hint, missing, names)
        return [column for column in (*self.columns, *self.optional) if column in names]


def read_rows(path: Path, columns: Sequence[str], hint: str, optional: Sequence[str] = ()) -> Rows:
    """The rows of a file or `datasets` folder with these columns; an absent optional column is None.

    Raises DataError with `hint` if the file is missing, damaged or empty, or if it lacks a column.
    """
    if not path.exists():
        raise DataError(f"{path}: no such file", hint=hint)
    kind = "datasets folder" if path.is_dir() else path.suffix.removeprefix(".")
    kind, read = (kind, _READERS[kind]) if kind in _READERS else ("parquet file", _parquet)
    try:
        rows = read(path, _Wanted(columns, optional, hint))
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not a readable {kind}: {error}", hint=hint) from error
    if not rows:
        raise DataError(f"{path}: the file has no rows", hint=hint)
    absent = dict.fromkeys(optional)
    return [absent | row for row in rows]


def rows_in_memory(where: str, rows: Sequence[Any], columns: Sequence[str], hint: str, optional: Sequence[str]) -> Rows:
    """The same of rows that something else has read; `where` stands for their file in errors."""
    if not rows:
        raise DataError(f"{where}: there are no rows", hint=hint)
    wanted, absent = _Wanted(columns, optional, hint), dict.fromkeys(optional)
    return [absent | _columns(f"{where}, row {number}", row, wanted) for number, row in enumerate(rows)]


def value_at(where: str, row: Mapping[str, Any], key: str, hint: str) -> Any:
    """The value of a row under a key; a dot enters a mapping. Raises DataError, which begins with `where`."""
    value: Any = row
    for name in key.split("."):
        if not isinstance(value, Mapping) or value.get(name) is None:
            raise DataError(f"{where}: no {key}", hint=hint)
        value = value[name]
    return value


def column_of(key: str) -> str:
    """The column that holds the value of a key; see `value_at`."""
    return key.partition(".")[0]


def stored_files(path: Path) -> list[Path]:
    """The files that hold the rows of `path`: itself, or the files of a `datasets` folder."""
    return sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]


def _parquet(path: Path, wanted: _Wanted) -> Rows:
    with pq.ParquetFile(path, memory_map=True) as file:
        rows: Rows = file.read(columns=wanted.among(str(path), file.schema_arrow.names)).to_pylist()
    return rows


def _datasets_folder(path: Path, wanted: _Wanted) -> Rows:
    if (path / _SPLITS).is_file():
        splits = ", ".join(str(path / name) for name in _manifest(path / _SPLITS, "splits"))
        raise DataError(f"{path}: a folder of several splits", hint=f"name one of them: {splits}")
    if not (path / _STATE).is_file():
        raise DataError(
            f"{path}: a folder without {_STATE}, so `datasets` did not save it",
            hint="name the files in it, or a folder that datasets.Dataset.save_to_disk wrote",
        )
    rows: Rows = []
    for stored in _manifest(path / _STATE, "_data_files"):
        with pa.memory_map(str(path / stored["filename"])) as source:
            table = pa.ipc.open_stream(source).read_all()
            rows += table.select(wanted.among(str(path), table.column_names)).to_pylist()
    return rows


def _manifest(file: Path, key: str) -> list[Any]:
    """A list in one of the JSON files of a datasets folder."""
    try:
        return list(json.loads(file.read_text(encoding="utf-8"))[key])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file}: damaged: {error!r}", hint="save the dataset again") from error


def _json_lines(path: Path, wanted: _Wanted) -> Rows:
    """The objects of a file, one per line. Only a line feed ends a line: texts may contain U+2028."""
    with path.open(encoding="utf-8", newline="\n") as file:
        return [
            _object(f"{path}, line {number}", line, wanted) for number, line in enumerate(file, start=1) if line.strip()
        ]


def _json_document(path: Path, wanted: _Wanted) -> Rows:
    """The objects of a JSON array, or of JSON Lines under the name .json."""
    text = path.read_text(encoding="utf-8")
    if not text.lstrip().startswith("["):
        return _json_lines(path, wanted)
    values = _parsed(str(path), text, wanted)
    return [_columns(f"{path}, row {number}", value, wanted) for number, value in enumerate(values)]


def _object(where: str, text: str, wanted: _Wanted) -> dict[str, Any]:
    return _columns(where, _parsed(where, text, wanted), wanted)


def _parsed(where: str, text: str, wanted: _Wanted) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(f"{where}: not JSON: {error}", hint=wanted.hint) from error


def _columns(where: str, value: Any, wanted: _Wanted) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{where}: {value!r:.40} is not an object with columns", hint=wanted.hint)
    return {column: value[column] for column in wanted.among(where, list(value))}


_READERS: dict[str, Callable[[Path, _Wanted], Rows]] = {
    "jsonl": _json_lines,
    "json": _json_document,
    "datasets folder": _datasets_folder,
}
"""By suffix. Any other file is read as Parquet."""
