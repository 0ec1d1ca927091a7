"""Reads files of a host below a root directory: facts of the system, and files in which its user sets something.

And links files.
"""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from buildkit.errors import SettingsError


def entries(folder: Path) -> Iterator[Path]:
    try:
        yield from sorted(folder.iterdir())
    except OSError:
        return


def read_text(path: Path) -> str:
    """A fact's text without surrounding blanks, empty if it cannot be read: an unset GID slot fails with EINVAL."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def is_file(path: Path) -> bool:
    """Whether there is such a file. pathlib raises for a name that is too long."""
    try:
        return path.is_file()
    except OSError:
        return False


def is_folder(path: Path) -> bool:
    """Whether there is such a folder, as `is_file`."""
    try:
        return path.is_dir()
    except OSError:
        return False


def settings_text(path: Path) -> str:
    """The text of a file in which somebody sets something. Raises `SettingsError` if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise SettingsError(
            f"{path} cannot be read: {error.strerror}", "make it a readable file, or remove it"
        ) from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path} is not UTF-8 text", "save it as UTF-8, or remove it") from error


def found(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text, re.MULTILINE)
    return match[1] if match else None


def link(source: Path, target: Path) -> None:
    """A hard link where the file system allows it, else a copy."""
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copy2(source, target)
