"""Functions and classes from Python files of the user's."""

import difflib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError


def load_custom(setting: str, path: Path, name: str) -> Callable[..., Any]:
    """`name` from the file at `path`, which `setting` asks for. Runs the file. Raises ConfigError."""
    if not path.is_file():
        raise ConfigError(f"{setting}.path={path}: no such file", hint="name a file that every node can read")
    spec = importlib.util.spec_from_file_location(f"slipway_custom_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{setting}.path={path}: not a Python file", hint="name a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(
            f"{setting}.path={path} cannot be imported: {type(error).__name__}: {error}", hint="mend that file"
        ) from error
    found = getattr(module, name, None)
    if not callable(found):
        near = difflib.get_close_matches(name, [item for item in vars(module) if not item.startswith("_")], n=1)
        hint = f"set {setting}.name={near[0]}" if near else f"set {setting}.name to what the file defines"
        raise ConfigError(f"{setting}: {path} has no {name} to call", hint=hint)
    return found  # type: ignore[no-any-return]
