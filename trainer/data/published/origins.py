"""Where the rows of a published data set come from: the hub, a local copy, or a generator."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Protocol

from trainer.data.formats.files import MissingColumnError, column_of, read_rows
from trainer.data.published.conversion import Parts
from trainer.data.published.mapping import column_options, likely_column
from trainer.data.published.table import TEST, TRAIN, PublishedDataset
from trainer.errors import DataError
from trainer.hub import download

SUFFIXES = (".parquet", ".jsonl", ".json")
_OFFLINE = "read a local copy with --from, or make rows up with --synthetic N"


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
            patterns = [split.files] if repository == split.hub else [f"*{suffix}" for suffix in SUFFIXES]
            files = _files_of(download(repository, "data set", patterns, f"{repository}:", _OFFLINE), name, split.files)
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


def split_files(folder: Path, split: str, pattern: str) -> dict[Path, list[Path]]:
    """The files of a split by the folder that they are in: those that match the pattern, else those whose name begins
    with the split."""
    files = _data_files(folder)
    chosen = [path for path in files if fnmatch(str(path.relative_to(folder)), pattern)]
    chosen = chosen or [path for path in files if path.name.startswith(split)]
    return {place: [path for path in chosen if path.parent == place] for place in sorted({f.parent for f in chosen})}


def _data_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES)


def _files_of(folder: Path, split: str, pattern: str) -> list[Path]:
    """The files of a split, which are in one folder. Raises DataError."""
    groups = split_files(folder, split, pattern)
    if not groups:
        shown = ", ".join(str(path.relative_to(folder)) for path in _data_files(folder)[:10])
        raise DataError(
            f"{folder}: no {split} files like {pattern} or {split}*.parquet; it has "
            f"{shown or 'no Parquet or JSON Lines file'}",
            hint="name the files themselves: --from TRAIN_FILE --from TEST_FILE, the latter with `test` in its name",
        )
    places = [str(place.relative_to(folder)) for place in groups]
    if len(places) > 1:
        raise DataError(
            f"{folder}: {split} files in several folders: {', '.join(places)}",
            hint=f"name one of them: --from {folder / places[0]}",
        )
    (files,) = groups.values()
    return files


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
            options = column_options({part: likely_column(part, error.present) or "COLUMN" for part in missing})
            raise DataError(f"{error}; data {dataset.name} needs {_listed(mapping)}", hint=f"try {options}") from error
        parts += [{part: _value(row, column) for part, column in mapping.items()} for row in rows]
    return Rows(tuple(files), parts, split.data_source)


def _listed(mapping: Mapping[str, str]) -> str:
    """The columns, with the part that each holds if its name is another."""
    return ", ".join(part if part == column else f"{column} ({part})" for part, column in mapping.items())


def _value(row: Mapping[str, Any], key: str) -> Any:
    """The value under a key; a dot enters a mapping. None without one."""
    value: Any = row
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
