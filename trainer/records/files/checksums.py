"""The SHA-256 of files."""

import hashlib
from functools import cache
from pathlib import Path


def sha256(file: Path) -> str:
    """The SHA-256 of a file, in hexadecimal. A file that did not change is read once per process."""
    status = file.stat()
    return _sha256(file, status.st_size, status.st_mtime_ns)


@cache
def _sha256(file: Path, _size: int, _modified: int) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
