"""Files and directories that are complete or absent: written under another name, then renamed."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def _beside(path: Path, role: str) -> Path:
    """A hidden name in the same directory, because a rename works only within one file system."""
    return path.with_name(f".{path.name}.{os.getpid()}.{role}")


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yields a temporary path to write to; it replaces `path` if the block succeeds and vanishes if it fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _beside(path, "partial")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yields a new directory to fill; it replaces `path` if the block succeeds and vanishes if it fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary, retired = _beside(path, "partial"), _beside(path, "retired")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        if path.exists():  # rename() replaces only empty directories
            path.rename(retired)
        temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(retired, ignore_errors=True)
