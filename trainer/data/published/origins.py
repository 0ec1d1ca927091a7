"""Where the rows of a published data set come from: the hub, a local copy, or a generator."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Protocol

from trainer.data.formats.files import MissingColumnError, column_of, read_rows
from trainer.data.published.conversion import Parts
from trainer.data.published.hub import download
from trainer.data.published.table import TEST, TRAIN, PublishedDataset
from trainer.errors import DataError

_SUFFIXES = (".parquet", ".jsonl", ".json")
# Names under which other data sets have a part, likely ones first.
_LIKELY = {
    "question": ("question", "problem", "prompt", "query", "instruction", "input"),
    "answer": ("answer", "solution", "ground_truth", "final_answer", "target", "response", "output"),
    "tests": ("tests", "test_cases", "input_output", "public_tests", "ground_truth"),
    "prompt": ("prompt", "question", "instruction", "input"),
    "chosen": ("chosen", "response_chosen", "preferred", "better", "positive"),
    "rejected": ("rejected", "response_rejected", "dispreferred", "worse", "negative"),
}


@dataclass(frozen=True)
class Rows:
    """The rows of a split: the files that hold them (none if made up), the parts of each, and their data source."""

    files: tuple[Path, ...]
    parts: list[Parts]
    data_source: str

    @property
    def where(self) -> str:
        """Where the rows are from, for messages."""
        return ", ".join(map(str, self.files)) or self.data_source


class Origin(Protocol):
    """Gives the splits of a data set. Raises DataError."""

    def splits(self, dataset: PublishedDataset) -> Iterator[tuple[str, Rows]]: ...


@dataclass(frozen=True)
class Hub:
    """The hub's repositories, or `name` instead of them."""

    name: str = ""
    columns: Mapping[str, str] | None = None

    def splits(self, dataset: PublishedDataset) -> Iterator[tuple[str, Rows]]:
        for name, split in dataset.splits.items():
            repository = self.name or split.hub
            patterns = [split.files] if repository == split.hub else [f"*{suffix}" for suffix in _SUFFIXES]
            files = _files_of(download(repository, patterns), name, split.files)
            yield name, _read(dataset, name, files, self.columns)


@dataclass(frozen=True)
class Local:
    """A folder with files of both splits, like a clone of the hub's repository, or files of either."""

    paths: tuple[Path, ...]
    columns: Mapping[str, str] | None = None

    def splits(self, dataset: PublishedDataset) -> Iterator[tuple[str, Rows]]:
        if len(self.paths) == 1 and self.paths[0].is_dir():
            files = {name: _files_of(self.paths[0], name, split.files) for name, split in dataset.splits.items()}
        else:
            files = {TRAIN: [], TEST: []}
            for path in self.paths:
                files[TEST if TEST in path.stem else TRAIN].append(path)
        for name, paths in files.items():
            if paths:
                yield name, _read(dataset, name, paths, self.columns)


@dataclass(frozen=True)
class Synthetic:
    """`count` training rows from a seed and an eighth as many others to test on."""

    count: int
    seed: int = 0

    def splits(self, dataset: PublishedDataset) -> Iterator[tuple[str, Rows]]:
        rows = dataset.synthesize(self.count + max(1, self.count // 8), self.seed)
        yield TRAIN, Rows((), rows[: self.count], dataset.synthetic_source)
        yield TEST, Rows((), rows[self.count :], dataset.synthetic_source)


def _files_of(folder: Path, split: str, pattern: str) -> list[Path]:
    """The files of a split: those that match the pattern, else those in one folder whose name begins with the split."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in _SUFFIXES)
    chosen = [path for path in files if fnmatch(str(path.relative_to(folder)), pattern)]
    chosen = chosen or [path for path in files if path.name.startswith(split)]
    if not chosen:
        shown = ", ".join(str(path.relative_to(folder)) for path in files[:10]) or "no Parquet or JSON Lines file"
        raise DataError(
            f"{folder}: no {split} files like {pattern} or {split}*.parquet; it has {shown}",
            hint="name the files themselves: --from TRAIN_FILE --from TEST_FILE, the latter with `test` in its name",
        )
    places = sorted({str(path.parent.relative_to(folder)) for path in chosen})
    if len(places) > 1:
        raise DataError(
            f"{folder}: {split} files in several folders: {', '.join(places)}",
            hint=f"name one of them: --from {folder / places[0]}",
        )
    return chosen


def _read(dataset: PublishedDataset, name: str, files: list[Path], columns: Mapping[str, str] | None) -> Rows:
    split = dataset.splits[name]
    mapping = {**split.columns, **(columns or {})}
    needed = list(dict.fromkeys(map(column_of, mapping.values())))
    hint = f"data {dataset.name} reads {_listed(mapping)} from Parquet or JSON Lines"
    parts: list[Parts] = []
    for file in files:
        try:
            rows = read_rows(file, needed, hint)
        except MissingColumnError as error:
            missing = [part for part, column in mapping.items() if column_of(column) in error.missing]
            options = " ".join(f"--column {part}={_likely(part, error.present)}" for part in missing)
            raise DataError(f"{error}; data {dataset.name} needs {_listed(mapping)}", hint=f"try {options}") from error
        parts += [{part: _value(row, column) for part, column in mapping.items()} for row in rows]
    return Rows(tuple(files), parts, split.data_source)


def _listed(mapping: Mapping[str, str]) -> str:
    """The columns, with the part that each holds if its name is another."""
    return ", ".join(part if part == column else f"{column} ({part})" for part, column in mapping.items())


def _likely(part: str, present: Sequence[str]) -> str:
    """The column that most likely holds a part, or COLUMN."""
    return next((name for name in _LIKELY[part] if name in present), "COLUMN")


def _value(row: Mapping[str, Any], key: str) -> Any:
    """The value under a key; a dot enters a mapping. None without one."""
    value: Any = row
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
