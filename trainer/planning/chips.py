"""Dense bfloat16 FLOP/s of the chips that a run may compute on, for its model FLOPs utilisation (MFU)."""

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

_TABLE = Path(__file__).parents[2] / "images" / "chips.toml"


@cache
def _rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = tomllib.loads(_TABLE.read_text(encoding="utf-8"))["chips"]
    return rows


def dense_bf16_flops(device: str) -> float | None:
    """FLOP/s of a device by its name; None for one that the table lacks."""
    return next((row["matrix"] * 1e12 for row in _rows() if any(part in device for part in row["names"])), None)
