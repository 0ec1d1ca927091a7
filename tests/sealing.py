"""Documents that hold their own SHA-256, written by somebody who knows that format."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def with_seal(tree: dict[str, Any]) -> str:
    """A document with this content."""
    seal = hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()
    return json.dumps({**tree, "sha256": seal}, indent=2)


def reseal(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes a document so that its SHA-256 fits."""
    tree = json.loads(file.read_text())
    del tree["sha256"]
    change(tree)
    file.write_text(with_seal(tree))
