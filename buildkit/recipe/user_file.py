"""Finds and reads `slipway.toml`, in which users keep their own variants and what they add to images."""

import difflib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from buildkit.errors import MatrixError
from buildkit.host.accelerators import ACCELERATORS
from buildkit.recipe.extension import Extension, read_extension
from buildkit.recipe.toml import read_toml, table_of

NAME = "slipway.toml"
TABLES = ("extend", "targets")
OPTIONS = ("with", "apt", "copy")


@dataclass(frozen=True)
class UserFile:
    """`variants` holds the tables of variants by target and name; `extension` applies to every image."""

    path: Path
    variants: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    extension: Extension | None = None


def find_user_file(current: Path) -> Path | None:
    """The nearest `slipway.toml` in this folder or above it."""
    return next((folder / NAME for folder in (current, *current.parents) if (folder / NAME).is_file()), None)


def read_user_file(path: Path) -> UserFile:
    """Raises `MatrixError` with file and key for a malformed file, and as `read_extension` does."""
    data = read_toml(path)
    refuse_unknown(data, TABLES, path, "the file")
    variants = {}
    targets = data.get("targets", {})
    refuse_unknown(targets, tuple(ACCELERATORS), path, "targets")
    for target, table in targets.items():
        refuse_unknown(table, ("variants",), path, f"targets.{target}")
        variants[target] = table_of(table, "variants", path, f"targets.{target}")
    extend = data.get("extend", {})
    refuse_unknown(extend, OPTIONS, path, "extend")
    for option, names in extend.items():
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise MatrixError(f"{path}: extend.{option} is not a list of names", f'write {option} = ["…"]')
    folder = path.parent
    extension = read_extension(
        [folder / name for name in extend.get("with", ())],
        extend.get("apt", ()),
        [folder / name for name in extend.get("copy", ())],
    )
    return UserFile(path, variants, extension)


def refuse_unknown(table: Any, known: tuple[str, ...], path: Path, where: str) -> None:
    if not isinstance(table, dict):
        raise MatrixError(f"{path}: {where} is not a table", f"write [{where}] above its keys")
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            guess = f"did you mean `{near[0]}`? " if near else ""
            raise MatrixError(f"{path}: {where} has an unknown key `{key}`", f"{guess}known: {', '.join(known)}")
