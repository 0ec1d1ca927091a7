"""Turns a function of one dataclass into a typer command: the dataclass declares the command's parameters."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints


def command(function: Callable[[Any], None]) -> Callable[..., None]:
    """A typer command of a function that takes one dataclass.

    Each field, annotated for typer, becomes a parameter; a field that is a dataclass contributes its own fields.
    """
    (kind,) = (hint for name, hint in get_type_hints(function).items() if name != "return")

    def run(**values: Any) -> None:
        function(filled(kind, values))

    run.__name__, run.__doc__ = function.__name__, function.__doc__
    vars(run)["__signature__"] = inspect.Signature(list(parameters(kind)))
    return run


def parameters(kind: Any) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    for entry in fields(kind):
        hint: Any = hints[entry.name]
        if is_dataclass(hint):
            yield from parameters(hint)
            continue
        default = entry.default if entry.default is not MISSING else inspect.Parameter.empty
        if entry.default_factory is not MISSING:
            default = entry.default_factory()
        yield inspect.Parameter(entry.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def filled(kind: Any, values: Mapping[str, Any]) -> Any:
    """The dataclass with the values of typer's parameters."""
    hints: dict[str, Any] = get_type_hints(kind)
    return kind(**{name: filled(hint, values) if is_dataclass(hint) else values[name] for name, hint in hints.items()})
