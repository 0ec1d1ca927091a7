"""Files with one JSON object per line, which outlive a full disk."""

import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class LineFile:
    """Appends lines to a file. What cannot be written waits in memory and is written with the next line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._size = path.stat().st_size
        self._waiting: list[bytes] = []

    def append(self, row: Mapping[str, Any]) -> None:
        """Adds a row. Numbers that are not finite become null: JSON has no other name for them."""
        finite = {name: None if _not_finite(value) else value for name, value in row.items()}
        self._waiting.append(json.dumps(finite, ensure_ascii=False, allow_nan=False).encode() + b"\n")
        self._write()

    def close(self) -> None:
        if self._waiting:
            self._write()
        if self._waiting:
            logger.error("%s: the last %d lines are lost: the disk is full or away", self._path, len(self._waiting))
        self._file.close()

    def _write(self) -> None:
        content = b"".join(self._waiting)
        try:
            written = 0
            while written < len(content):
                written += os.write(self._file.fileno(), content[written:])
        except OSError as error:
            if len(self._waiting) == 1:  # the first of this outage
                logger.warning("%s: cannot be written, its lines wait in memory: %s", self._path, error)
            os.ftruncate(self._file.fileno(), self._size)  # half a line would damage the file
        else:
            self._size += written
            self._waiting = []


def _not_finite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
