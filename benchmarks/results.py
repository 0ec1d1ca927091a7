"""Measured rows, and measured/learning.md with one section per benchmark, which alone writes it."""

import json
import re
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "measured" / "learning.md"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_section(title: str, body: str, path: Path = RESULTS) -> None:
    """Replaces the section with this title, or appends it."""
    text = path.read_text(encoding="utf-8") if path.is_file() else "# Results\n"
    section = f"## {title}\n\n{body.strip()}\n"
    pattern = re.compile(rf"^## {re.escape(title)}\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
    if pattern.search(text):
        text = pattern.sub(lambda _: f"{section}\n", text, count=1)
    else:
        text = f"{text.rstrip()}\n\n{section}"
    path.write_text(f"{text.rstrip()}\n", encoding="utf-8")
