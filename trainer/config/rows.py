"""What people add as one file with one row: the row types that settings depend on, and how rows are found.

Each module of the folder defines `ROW`. Settings take names and parameters from there, so that a new file needs no
other change. The modules may import only this file and what is below the settings: the settings load them.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar


@dataclass(frozen=True, kw_only=True)
class Row:
    """Base class. `name` is what the user writes in the settings."""

    name: str


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A setting of one row, like `reward.pattern`. Without a default the user must give a value."""

    type: Any
    description: str
    default: Any = None


@dataclass(frozen=True, kw_only=True)
class RewardRule(Row):
    """A rule in `trainer/rewards/rules/`.

    `score(response, ground_truth, **parameters)` returns a finite number, usually 1.0 for right and 0.0 for wrong.
    Each parameter is a setting of the section `reward`. A rule that may hang on some responses runs in processes of
    its own, under `reward.timeout`.
    """

    score: Callable[..., float]
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    may_hang: bool = False


AnyRow = TypeVar("AnyRow", bound=Row)


def find_rows(package: str, kind: type[AnyRow]) -> dict[str, AnyRow]:
    """The rows of a package's modules by name, in alphabetical order.

    Raises TypeError if a module has no `ROW` of this kind, ValueError if two have the same name.
    """
    rows: dict[str, AnyRow] = {}
    for module in sorted(pkgutil.iter_modules(importlib.import_module(package).__path__), key=lambda found: found.name):
        row = getattr(importlib.import_module(f"{package}.{module.name}"), "ROW", None)
        if not isinstance(row, kind):
            raise TypeError(f"{package}.{module.name} defines no ROW of type {kind.__name__}")
        if row.name in rows:
            raise ValueError(f"{package}.{module.name}: another module defines the row {row.name}")
        rows[row.name] = row
    return rows
