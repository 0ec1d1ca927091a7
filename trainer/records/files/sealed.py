"""JSON documents that hold the SHA-256 of their content, which detects damage."""

import hashlib
import json
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from trainer.records.files.regular import read_regular

SEAL = "sha256"
MOST_BYTES = 2**28

Content = TypeVar("Content", bound=BaseModel)


def sealed(content: BaseModel) -> str:
    """The text of a document."""
    tree = json.loads(content.model_dump_json())
    return json.dumps({**tree, SEAL: _digest(tree)}, indent=2, ensure_ascii=False) + "\n"


def read_sealed(kind: type[Content], file: Path) -> Content:
    """The content of a document. Raises OSError if it cannot be read, ValueError with one line if it is damaged."""
    try:
        tree = json.loads(read_regular(file, MOST_BYTES))
        if not isinstance(tree, dict):
            raise ValueError("it is not a JSON object")
        seal = tree.pop(SEAL, None)
        if seal is None:
            raise ValueError("it lacks its own SHA-256: it changed, or another version wrote it")
        if seal != _digest(tree):
            raise ValueError("it changed since it was written (SHA-256)")
        return kind.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        raise ValueError(first_complaint(error)) from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def first_complaint(error: ValidationError) -> str:
    """A line without pydantic's excerpt of the input and the address of its documentation."""
    first = error.errors(include_input=False, include_url=False)[0]
    return ": ".join(filter(None, [".".join(map(str, first["loc"])), first["msg"]]))


def _digest(tree: dict[str, Any]) -> str:
    """The SHA-256 of a JSON object, however it is spaced and ordered."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()
