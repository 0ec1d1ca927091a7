"""Which columns of a file hold the parts of a published data set's rows, by their names and values."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.data.formats.files import read_rows
from trainer.data.published.conversion import UnusableRowError
from trainer.data.published.table import DATASETS, TEST, TRAIN, PublishedDataset

# Names under which data sets have a part, likely ones first.
_LIKELY = {
    "question": ("question", "problem", "prompt", "query", "instruction", "input"),
    "answer": ("answer", "solution", "ground_truth", "final_answer", "target", "response", "output"),
    "tests": ("tests", "test_cases", "input_output", "public_tests", "ground_truth"),
    "prompt": ("prompt", "question", "instruction", "input"),
    "chosen": ("chosen", "response_chosen", "preferred", "better", "positive"),
    "rejected": ("rejected", "response_rejected", "dispreferred", "worse", "negative"),
}


def likely_column(part: str, present: Sequence[str]) -> str | None:
    """The column that most likely holds a part; None if none is likely."""
    return next((name for name in _LIKELY[part] if name in present), None)


def column_options(columns: Mapping[str, str]) -> str:
    """Options of `trainer data` that name the column of each part."""
    return " ".join(f"--column {part}={column}" for part, column in columns.items())


def conversion_hint(file: Path, present: Sequence[str]) -> str:
    """The command that makes training rows of a file with these columns: that of the first published data set whose
    columns are there, and whose conversion takes the first row."""
    for dataset in DATASETS.values():
        columns = {part: column for part in dataset.parts if (column := likely_column(part, present))}
        if len(columns) == len(dataset.parts) and _converts(dataset, columns, file):
            return f"{_command(dataset, file, columns)}, then name data/{dataset.name}/{_split(file)}.parquet"
    columns = dict.fromkeys(DATASETS["dapo"].parts, "COLUMN")
    return f"a row needs a question and its answer: {_command(DATASETS['dapo'], file, columns)}"


def _converts(dataset: PublishedDataset, columns: Mapping[str, str], file: Path) -> bool:
    row = read_rows(file, [*columns.values()], "write the same columns into every row")[0]
    try:
        dataset.convert({part: row[column] for part, column in columns.items()})
    except UnusableRowError:
        return False
    return True


def _command(dataset: PublishedDataset, file: Path, columns: Mapping[str, str]) -> str:
    given = {part: column for part, column in columns.items() if column != dataset.splits[_split(file)].columns[part]}
    return (
        f"`{' '.join(filter(None, [f'python -m trainer data {dataset.name} --from {file}', column_options(given)]))}`"
    )


def _split(file: Path) -> str:
    """The split that `trainer data` takes a file for."""
    return TEST if TEST in file.stem else TRAIN
