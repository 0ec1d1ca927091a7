"""Append-only files of records, such as JSON lines, that survive a full disk."""

import json
import logging
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.records.files.regular import open_regular

logger = logging.getLogger(__name__)


class RecordFile:
    """Appends records to a file. A record that cannot be written waits in memory for the next one."""

    def __init__(self, path: Path) -> None:
        """Raises OSError, also if there is something else than a regular file."""
        self._path = path
        self._descriptor: int | None = open_regular(path, _APPEND)
        self._size = path.stat().st_size
        self._waiting: list[bytes] = []

    def append(self, record: bytes) -> None:
        self._waiting.append(record)
        self._write()

    def close(self) -> None:
        if self._waiting:
            self._write()
        if self._waiting:
            logger.error("%s: the last %d records are lost: the disk is full or away", self._path, len(self._waiting))
        self._release()

    def _write(self) -> None:
        content = b"".join(self._waiting)
        try:
            file = self._opened()
            written = 0
            while written < len(content):
                written += os.write(file, content[written:])
        except OSError as error:
            if len(self._waiting) == 1:  # the first of this outage
                logger.warning("%s: cannot be written, its records wait in memory: %s", self._path, error)
            self._release(cut=True)
        else:
            self._size += written
            self._waiting = []

    def _opened(self) -> int:
        """The open file. After a failure it is opened again, because a network file system that returns may not know
        the old descriptor; and cut, because half a record would damage the file. Raises OSError."""
        if self._descriptor is None:
            self._descriptor = open_regular(self._path, _APPEND)
            self._size = min(self._size, os.fstat(self._descriptor).st_size)
            os.ftruncate(self._descriptor, self._size)
        return self._descriptor

    def _release(self, cut: bool = False) -> None:
        """Closes the file; with `cut` without the half record of a failed write, if it can still be cut."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        with suppress(OSError):  # of a file system that is away; what waits is written again
            if cut:
                os.ftruncate(descriptor, self._size)
        with suppress(OSError):
            os.close(descriptor)


class LineFile:
    """A record file with one JSON object per line."""

    def __init__(self, path: Path) -> None:
        self._file = RecordFile(path)

    def append(self, row: Mapping[str, Any]) -> None:
        """Adds a row. Numbers that are not finite become null: JSON has no other name for them."""
        finite = {name: None if _not_finite(value) else value for name, value in row.items()}
        text = json.dumps(finite, ensure_ascii=False, allow_nan=False)
        self._file.append(text.encode(errors="replace") + b"\n")  # half a surrogate pair has no UTF-8

    def close(self) -> None:
        self._file.close()


_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT


def _not_finite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
