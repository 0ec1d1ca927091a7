"""Writing a published data set as the files that recipes name."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.data.formats.schema import write_table
from trainer.data.published.conversion import UnusableRowError
from trainer.data.published.origins import Origin, Rows
from trainer.data.published.table import PublishedDataset
from trainer.errors import DataError

_log = logging.getLogger(__name__)


def write_dataset(dataset: PublishedDataset, origin: Origin, directory: Path) -> Iterator[Path]:
    """Writes `train.parquet` and `test.parquet`, and gives the path of each after it is written.

    Rows that cannot be used are left out and counted in the log, which also says which files are synthetic. Raises
    DataError if the origin lacks files or columns, or if no row of a split can be used.
    """
    files = [
        (directory / f"{split}.parquet", rows, _converted(dataset, split, rows))
        for split, rows in origin.splits(dataset)
    ]
    for path, rows, _ in files:
        if path.resolve() in [file.resolve() for file in rows.files]:
            raise DataError(f"{path}: the output is the input", hint="name another --output")
    for path, rows, converted in files:
        write_table(converted, path)
        kind = "SYNTHETIC rows, to try a recipe with" if not rows.files else "rows"
        _log.info("%s: %d %s, data_source %s", path, len(converted), kind, rows.data_source)
        yield path


def _converted(dataset: PublishedDataset, split: str, rows: Rows) -> list[dict[str, Any]]:
    converted, reasons = [], []
    for index, parts in enumerate(rows.parts):
        try:
            row = dataset.convert(parts)
        except UnusableRowError as error:
            reasons.append(f"row {index}: {error}")
            continue
        row["extra_info"] = {"split": split, "index": index, **row["extra_info"]}
        converted.append({"data_source": rows.data_source, **row})
    if not converted:
        raise DataError(
            f"{rows.where}: no row can be used; {reasons[0]}",
            hint=f"name the columns that data {dataset.name} needs: "
            + " ".join(f"--column {part}=COLUMN" for part in dataset.splits[split].columns),
        )
    if reasons:
        _log.warning("%s: left out %d of %d rows; %s", rows.where, len(reasons), len(rows.parts), reasons[0])
    return converted
