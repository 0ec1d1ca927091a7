"""Functions and classes from the user's Python files."""

import difflib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, Field, model_validator

from trainer.config.section import AbsolutePath, Section
from trainer.errors import ConfigError


class CustomCode(Section):
    """A function or class in a Python file of the user."""

    path: AbsolutePath | None = Field(None, description="Python file, the same on every node")
    name: str | None = Field(None, description="function or class in that file")

    @model_validator(mode="after")
    def _both_or_none(self) -> Self:
        if self.path is None and self.name is not None:
            raise ValueError(f"name={self.name} is given without the path of its file")
        return self

    @property
    def origin(self) -> tuple[str, str] | None:
        """The setting that gives the code, and the code in words; None if none is given."""
        return None if self.path is None else ("path", f"code of {self.path}")


def code_lines(section: BaseModel, prefix: str = "") -> Iterator[str]:
    """A line for each file or function of the user whose code the run executes."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, CustomCode) and value.origin is not None:
            setting, code = value.origin
            yield f"runs {code}, because {prefix}{name}.{setting} names it"
        elif isinstance(value, BaseModel):
            yield from code_lines(value, f"{prefix}{name}.")


def load_custom(setting: str, path: Path, name: str) -> Callable[..., Any]:
    """The function or class `name` of the file at `path`. Runs the file.

    Raises ConfigError, which names `setting`, if the file or the name does not exist.
    """
    if not path.is_file():
        raise ConfigError(f"{setting}.path={path}: no such file", hint="name a file that every node can read")
    import_from_here()
    spec = importlib.util.spec_from_file_location(f"slipway_custom_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{setting}.path={path}: not a Python file", hint="name a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(
            f"{setting}.path={path} cannot be imported: {type(error).__name__}: {error}", hint="fix that file"
        ) from error
    code = getattr(module, name, None)
    if not callable(code):
        near = difflib.get_close_matches(name, [item for item in vars(module) if not item.startswith("_")], n=1)
        hint = f"set {setting}.name={near[0]}" if near else f"set {setting}.name to what the file defines"
        raise ConfigError(f"{setting}: {path} has no {name} to call", hint=hint)
    return code  # type: ignore[no-any-return]


def import_from_here() -> None:
    """Lets a user's code import modules of the current directory, after Python's: `launch` starts the trainer without
    it."""
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))


def check_method(setting: str, owner: object, name: str) -> Callable[..., Any]:
    """A method of the user's class or object. Raises ConfigError, which begins with `setting`, without one."""
    method = getattr(owner, name, None)
    if not callable(method):
        kind = owner if isinstance(owner, type) else type(owner)
        raise ConfigError(f"{setting}: {kind.__name__} has no method {name}", hint=f"define {name}")
    return method  # type: ignore[no-any-return]


def check_parameters(
    setting: str, function: Callable[..., Any], named: Sequence[str] = (), positional: Sequence[str] = ()
) -> None:
    """Raises ConfigError, which begins with `setting`, if the function cannot be called with these arguments."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function in C may not tell
        return
    try:
        signature.bind(*positional, **dict.fromkeys(named))
    except TypeError as error:
        name = getattr(function, "__qualname__", type(function).__name__)
        arguments = ", ".join([*positional, *(f"{keyword}=…" for keyword in named)]) or "no arguments"
        raise ConfigError(
            f"{setting}: {name}{signature} cannot be called as it will be: {error}", hint=f"it gets {arguments}"
        ) from error
