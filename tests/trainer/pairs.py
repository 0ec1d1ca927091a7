"""Files of preference pairs."""

from pathlib import Path

from trainer.data.arithmetic import pairs
from trainer.data.formats.schema import write_table


def write_preferences(directory: Path, train: int, validation: int, max_number: int, seed: int) -> tuple[Path, ...]:
    """Pairs about sums in `preferences.parquet` and `preferences-validation.parquet`."""
    rows = [
        {**pair, "prompt": [{"role": "user", "content": pair["prompt"]}]}
        for pair in pairs(train + validation, max_number, seed)
    ]
    files = directory / "preferences.parquet", directory / "preferences-validation.parquet"
    write_table(rows[:train], files[0])
    write_table(rows[train:], files[1])
    return files
