"""Reads files of a host below a root directory. A file that is missing or unreadable is empty, never an error."""

import re
from collections.abc import Iterator
from pathlib import Path


def entries(folder: Path) -> Iterator[Path]:
    try:
        yield from sorted(folder.iterdir())
    except OSError:
        return


def read_text(path: Path) -> str:
    """The file's text without surrounding blanks. Reading an unset GID slot, for example, fails with EINVAL."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def found(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text, re.MULTILINE)
    return match[1] if match else None
