"""Reads the run-time environment tables `images/env/*.toml`: each value with the condition under which it applies.

All keys of a condition (`when`) must hold. Values without a condition are baked into the image; `launch` evaluates the
others on the host, from the image's manifest. docs/design.md defines the keys.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from buildkit.errors import MatrixError
from buildkit.host.accelerators import ACCELERATORS
from buildkit.host.machine import FABRICS

KEYS = ("name", "value", "when", "reason", "source")
VERSIONED = (*(row.runtime for row in ACCELERATORS.values() if row.runtime), "nccl", "vllm", "ray")
CONDITIONS = ("arch", *VERSIONED, "fabric")
# Operators on plain release numbers only, so that `launch` can compare them with the standard library.
SPECIFIER = re.compile(r"(>=|<=|==|!=|>|<)\s*\d+(\.\d+)*")
ARCHITECTURE = re.compile("|".join(row.architecture for row in ACCELERATORS.values() if row.architecture))
NAME = re.compile(r"[A-Z][A-Z0-9_]*")


@dataclass(frozen=True)
class EnvEntry:
    """One run-time environment value with its condition, its reason and the source of the reason."""

    name: str
    value: str
    when: dict[str, Any]
    reason: str
    source: str

    @property
    def always(self) -> bool:
        return not self.when


def parse_environment(table: dict[str, Any], path: Path) -> tuple[EnvEntry, ...]:
    """The entries of one file. Raises `MatrixError` with file, entry and key when something is malformed."""
    if unknown := set(table) - {"env"}:
        raise MatrixError(f"{path}: unknown table `{min(unknown)}`", "an environment table holds [[env]] entries only")
    entries = tuple(parse_entry(entry, index, path) for index, entry in enumerate(table.get("env", []), start=1))
    seen: list[tuple[str, dict[str, Any]]] = []
    for entry in entries:
        if (entry.name, entry.when) in seen:
            raise MatrixError(f"{path}: {entry.name} appears twice with the same condition", "keep one of the two")
        seen.append((entry.name, entry.when))
    return entries


def parse_entry(values: dict[str, Any], index: int, path: Path) -> EnvEntry:
    place = f"{path}: env {index} ({values.get('name', 'no name')})"
    if unknown := set(values) - set(KEYS):
        raise MatrixError(f"{place}: unknown key `{min(unknown)}`", f"known: {', '.join(KEYS)}")
    for key in ("name", "value", "reason", "source"):
        if not isinstance(values.get(key), str) or not values[key]:
            raise MatrixError(f"{place}: `{key}` is missing or not text", f'write {key} = "…"')
    if not NAME.fullmatch(values["name"]):
        raise MatrixError(f"{place}: `name` is not a variable name", "use capitals, digits and underscores")
    if not values["source"].startswith("https://"):
        raise MatrixError(f"{place}: `source` is not an https:// address", "give the page that states the reason")
    return EnvEntry(**{"when": {}, **values, **{"when": check_condition(values.get("when", {}), place)}})


def check_condition(when: Any, place: str) -> dict[str, Any]:
    if not isinstance(when, dict):
        raise MatrixError(
            f"{place}: `when` is not a table", 'write when = { rocm = "<6.4" }, or leave it out for always'
        )
    for key, value in when.items():
        if problem := condition_problem(key, value):
            raise MatrixError(f"{place}: `when.{key}`: {problem[0]}", problem[1])
    return when


def condition_problem(key: str, value: Any) -> tuple[str, str] | None:
    """The problem of a condition's key, and its fix; None when it is well-formed."""
    if key in VERSIONED:
        return None if is_specifier(value) else (f"{value!r} is not a version specifier", 'write it like ">=7.1,<7.2"')
    if key not in CONDITIONS:
        return "unknown key", f"known: {', '.join(CONDITIONS)}"
    if not isinstance(value, list) or not value:
        return f"{value!r} is not a list of names", f"write {key} = [ … ]"
    if key == "fabric":
        wrong = [item for item in value if item not in FABRICS]
        return (f"{wrong[0]!r} is not a fabric", f"known: {', '.join(FABRICS)}") if wrong else None
    wrong = [item for item in value if not isinstance(item, str) or not ARCHITECTURE.fullmatch(item)]
    return (f"{wrong[0]!r} is not an architecture", "write it like gfx942 or sm_90") if wrong else None


def is_specifier(value: Any) -> bool:
    if not isinstance(value, str) or not all(SPECIFIER.fullmatch(part.strip()) for part in value.split(",")):
        return False
    try:
        SpecifierSet(value)
    except InvalidSpecifier:
        return False
    return True
