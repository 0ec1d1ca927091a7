"""Reads TOML files into tables and data classes, with errors that name file, table and key."""

import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from buildkit.errors import MatrixError

Value = TypeVar("Value")


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MatrixError(f"{path} is missing", "run from a Slipway checkout, or name it with --project") from None
    except OSError as error:
        raise MatrixError(f"{path} cannot be read: {error.strerror}", "make it a readable file") from error
    except ValueError as error:  # TOMLDecodeError, text in another encoding, a number of thousands of digits
        raise MatrixError(f"{path}: {error}", "correct the TOML there") from error


@contextmanager
def values_of(path: Path) -> Iterator[None]:
    """Turns what a value of the wrong type causes into a `MatrixError` that names the file."""
    try:
        yield
    except (AttributeError, TypeError, ValueError) as error:
        raise MatrixError(
            f"{path}: a value has the wrong type: {error}", "compare it with its neighbours in the same file"
        ) from error


def table_of(data: dict[str, Any], key: str, path: Path, where: str = "") -> dict[str, Any]:
    value = data.get(key)
    if not isinstance(value, dict):
        raise MatrixError(
            f"{path}: no table `{key}`{f' in {where}' if where else ''}", "compare it with the repository's own"
        )
    return value


def build(kind: type[Value], values: dict[str, Any], path: Path, where: str) -> Value:
    """A data class from a TOML table. Raises `MatrixError` for a missing or unknown key."""
    try:
        return kind(**values)
    except TypeError as error:
        detail = str(error).split("__init__() ")[-1]
        raise MatrixError(f"{path}: {where}: {detail}", "compare it with its neighbours in the same file") from error
