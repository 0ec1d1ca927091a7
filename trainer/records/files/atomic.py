"""Files and directories that are complete or absent: written under another name, synced to disk, then renamed."""

import ctypes
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_HIDDEN = re.compile(r"^\.(.+)\.[0-9a-f]{12}\.(?:partial|retired)$")
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD, RENAME_EXCHANGE


def hidden_name(path: Path, role: str) -> Path:
    """A hidden, unique name in the same directory, because a rename works only within one file system."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.{role}")


def visible_name(path: Path) -> Path:
    """The path with the names for which `hidden_name` stands."""
    return Path(*(_HIDDEN.sub(r"\1", part) for part in path.parts))


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yields a temporary path to write to: it replaces `path` if the block succeeds, and is removed if it fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = hidden_name(path, "partial")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yields a new directory to fill: it replaces `path` if the block succeeds, and is removed if it fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = hidden_name(path, "partial")
    temporary.mkdir()
    try:
        yield temporary
        sync_tree(temporary)
        replace_directory(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def replace_directory(new: Path, path: Path) -> None:
    """Renames `new` to `path`. A directory that stood there is removed once the new one stands; it stands again if the
    rename fails."""
    if not path.exists():
        new.rename(path)
    elif _exchange(new, path):
        shutil.rmtree(new, ignore_errors=True)
    else:
        retired = hidden_name(path, "retired")
        path.rename(retired)  # rename() replaces only empty directories
        try:
            new.rename(path)
        except OSError:
            retired.rename(path)
            raise
        shutil.rmtree(retired, ignore_errors=True)
    sync(path.parent)


def remove_directory(path: Path) -> None:
    """Removes a directory atomically: no reader sees a part of it."""
    retired = hidden_name(path, "retired")
    path.rename(retired)
    shutil.rmtree(retired, ignore_errors=True)


def remove_remains(directory: Path, pattern: str) -> None:
    """Removes hidden files that writers of `pattern` left in this directory when they died."""
    for left in (*directory.glob(f".{pattern}.partial"), *directory.glob(f".{pattern}.retired")):
        shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Makes the content of a file, or the names in a directory, survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(directory: Path) -> None:
    """`sync` for a directory and everything below it."""
    for path in (*directory.rglob("*"), directory):
        if path.is_dir() or path.is_file():
            sync(path)


def bytes_below(directory: Path) -> int:
    """The size of all files below a directory to which others may write."""
    sizes = []
    for path in directory.rglob("*"):
        with suppress(OSError):
            sizes.append(path.stat().st_size)
    return sum(sizes)


def _exchange(path: Path, other: Path) -> bool:
    """Swaps two names in a single step; False where kernel, libc or file system cannot."""
    rename = getattr(_libc, "renameat2", None)
    return rename is not None and rename(_HERE, bytes(path), _HERE, bytes(other), _EXCHANGE) == 0
