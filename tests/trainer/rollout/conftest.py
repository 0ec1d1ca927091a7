"""Programs that start engines."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[3]


def found_by(program: Path, directory: Path, *arguments: object) -> dict[str, Any]:
    """What the program writes to found.json in the directory. A process of its own, because importing vLLM changes
    torch."""
    subprocess.run(
        [sys.executable, program, directory, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        check=True,
        timeout=280,
    )
    found: dict[str, Any] = json.loads((directory / "found.json").read_text())
    return found
