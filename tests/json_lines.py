"""Files of JSON lines to which a programme appends a result at a time, and which it continues after it was killed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The rows so far. A last line that was cut is left out."""
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def append_row(file: Path, row: Mapping[str, Any]) -> None:
    """Appends a row, in place of a line that was cut."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a+b") as opened:
        opened.seek(0)
        opened.truncate(opened.read().rfind(b"\n") + 1)
        opened.write(json.dumps(row).encode() + b"\n")
