"""Settings in YAML: the user's files, and the presets in `trainer/config/presets/`."""

import difflib
import os
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from trainer.config.hydra import flattened, read_yaml
from trainer.errors import ConfigError

PRESETS = Path(__file__).with_name("presets")

Bases = Mapping[str, Sequence[str]]
"""Presets or files that stand for configurations of another tool, by their names."""


def preset_names() -> list[str]:
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def read_settings(name: str, whole: Container[str] = (), bases: Bases = MappingProxyType({})) -> dict[str, Any]:
    """The settings of a preset or a YAML file, by dotted key.

    Settings in `whole` take a mapping as it is. A file may begin with Hydra's `defaults`, a list of files beside it and
    of names in `bases`. Raises ConfigError if the file does not exist or is not a mapping of settings.
    """
    preset, path = PRESETS / f"{name}.yaml", Path(name)
    if name in preset_names():
        path = preset
    near = difflib.get_close_matches(path.stem, preset_names(), n=1)
    hint = f"give a YAML file or one of the presets {', '.join(preset_names())}"
    hint = f"did you mean {near[0]}? {hint}" if near else hint
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: neither this name nor this content is text
        raise ConfigError(f"{name!r}: cannot be read: {error}", hint=hint) from error
    tree = read_yaml(name, text, hint)
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{name}: not a mapping of settings", hint=hint)
    return settings_in(name, tree, path.parent, whole, bases)


def settings_in(
    name: str, tree: Mapping[Any, Any], directory: Path, whole: Container[str] = (), bases: Bases = MappingProxyType({})
) -> dict[str, Any]:
    """The settings of the content of a file in `directory`; see `read_settings`. `name` begins errors."""
    body = {key: value for key, value in tree.items() if key not in ("defaults", "hydra")}
    leaves = {key: leaf for key, leaf in flattened("", body, whole).items() if not _of_hydra(key, leaf)}
    merged: dict[str, Any] = {}
    entries = tree.get("defaults") or []
    if not isinstance(entries, list):
        raise ConfigError(f"{name}: defaults is not a list of files", hint="write `defaults: [base, _self_]`")
    for base in entries if "_self_" in entries else [*entries, "_self_"]:
        merged |= leaves if base == "_self_" else _base(name, directory, base, whole, bases)
    return merged


def _of_hydra(key: str, value: object) -> bool:
    """Whether a leaf sets nothing: the class of a section, or Hydra's sign for a value that others have to give."""
    return key.rpartition(".")[2] == "_target_" or value == "???"


def _base(name: str, directory: Path, base: object, whole: Container[str], bases: Bases) -> dict[str, Any]:
    """The settings of an entry of `defaults`."""
    if not isinstance(base, str) or "@" in base:
        raise ConfigError(
            f"{name}: defaults: {base} selects a group of another tool's configuration",
            hint="write its settings into the file",
        )
    beside = directory / f"{base.removesuffix('.yaml')}.yaml"
    if os.path.exists(beside):  # noqa: PTH110 - Path.exists raises OSError for a name that is too long
        return read_settings(str(beside), whole, bases)
    if base in preset_names() or base not in bases:
        return read_settings(base if base in preset_names() else str(beside), whole, bases)
    return {key: value for preset in bases[base] for key, value in read_settings(preset, whole, bases).items()}
