"""Data sheets of chips, from the table `images/chips.toml`, which describes the fields."""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_TABLE = Path(__file__).parents[2] / "images" / "chips.toml"


@dataclass(frozen=True)
class Chip:
    names: tuple[str, ...]
    matrix: float
    """TFLOP/s."""
    memory: float
    """GB/s."""
    source: str
    link: float = 0.0
    """GB/s."""


@cache
def chips() -> tuple[Chip, ...]:
    rows = tomllib.loads(_TABLE.read_text(encoding="utf-8"))["chips"]
    return tuple(Chip(**{**row, "names": tuple(row["names"])}) for row in rows)


def chip_of(name: str) -> Chip | None:
    """The row of a device, or None for one that the table lacks."""
    return next((chip for chip in chips() if any(part in name for part in chip.names)), None)
