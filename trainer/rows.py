"""What people add as one file with one row: an algorithm, a loss, a reward rule, a logger.

Each module of such a folder defines `ROW`. Settings take names and parameters from the rows, so a new file needs no
other change. The settings import these modules, so they must not import the settings, and should import torch only
while type checking: `trainer config` then starts quickly.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A setting that a row reads, like `algorithm.gamma`. Several rows may share one parameter.

    `constraints` are keyword arguments of `pydantic.Field`, like `gt=0`. A parameter without a default must be given.
    """

    type: Any
    description: str
    default: Any = None
    constraints: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Row:
    """Base class. `name` is what the user writes in the settings, `parameters` are the row's own settings."""

    name: str
    parameters: Mapping[str, Parameter] = field(default_factory=dict)

    def values(self, settings: object) -> dict[str, Any]:
        """The row's parameters as keyword arguments, read from the section of the settings that holds them."""
        return {name: getattr(settings, name) for name in self.parameters}


@dataclass(frozen=True, kw_only=True)
class RewardRule(Row):
    """A rule in `trainer/rewards/rules/`.

    `score(response, ground_truth, **parameters)` returns a finite number, usually 1.0 for right and 0.0 for wrong, or a
    mapping that holds it under `score` beside further numbers to log. The ground truth is what the data holds: text, a
    number, a list or a mapping. The parameters are settings of the section `reward`.

    `answer(response, **parameters)` is the answer that the rule finds in a response, None if there is none. With it
    validation reports majority votes. A mapping from `score` may hold the answer under `pred` instead.

    `sources` are the data sources that `reward.name=auto` scores with this rule, as patterns like `aime*`. A rule that
    may hang on some responses runs in processes of its own: for at most `reward.timeout` seconds, or at most
    `time_limit(**parameters)` where the rule limits itself. `check(**parameters)` runs once before training: it raises
    ConfigError if the rule cannot work here, and returns a note for the user or "".
    """

    score: Callable[..., float | Mapping[str, float]]
    answer: Callable[..., str | None] | None = None
    sources: tuple[str, ...] = ()
    may_hang: bool = False
    time_limit: Callable[..., float] | None = None
    check: Callable[..., str] | None = None


AnyRow = TypeVar("AnyRow", bound=Row)


def find_rows(package: str, kind: type[AnyRow]) -> dict[str, AnyRow]:
    """The rows of a package's modules by name, in alphabetical order of the modules.

    Raises TypeError if a module has no `ROW` of this kind, ValueError if two have the same name.
    """
    rows: dict[str, AnyRow] = {}
    for module in sorted(pkgutil.iter_modules(importlib.import_module(package).__path__), key=lambda info: info.name):
        row = getattr(importlib.import_module(f"{package}.{module.name}"), "ROW", None)
        if not isinstance(row, kind):
            raise TypeError(f"{package}.{module.name} defines no ROW of type {kind.__name__}")
        if row.name in rows:
            raise ValueError(f"{package}.{module.name}: another module defines the row {row.name}")
        rows[row.name] = row
    return rows


def module_names(folder: str) -> tuple[str, ...]:
    """The modules of a folder below `trainer/`, sorted. None of them is imported: rollout engines need torch."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent / folder)])))
