"""How models write calls of tools in their turns."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.rows import Row


@dataclass(frozen=True)
class ToolCall:
    """A call as the model wrote it; `arguments` should be a JSON mapping."""

    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True)
class CallFormat(Row):
    """A format in `trainer/experience/formats/`.

    `parse` finds the calls in a turn. The text has its special tokens, the end token included. A call that cannot be
    read is none. `opening` is where the calls of a turn begin: what comes before is said to the user.
    """

    opening: str
    parse: Callable[[str], Sequence[ToolCall]]


def call_from_json(text: str, arguments: Sequence[str] = ("arguments",)) -> ToolCall | None:
    """The call in a JSON mapping with `name` and one of the keys `arguments`; None if there is none."""
    try:
        call: Any = json.loads(text)
        key = next((key for key in arguments if isinstance(call, dict) and key in call), None)
        if key is None or not isinstance(call.get("name"), str):
            return None
        return ToolCall(call["name"], json.dumps(call[key], ensure_ascii=False))
    except (ValueError, RecursionError):  # nested more deeply than Python can follow
        return None
