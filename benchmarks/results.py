"""Measured rows, and measured/learning.md with one section per benchmark, which alone writes it."""

import json
import re
import textwrap
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "measured" / "learning.md"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def wrapped(body: str, width: int = 120) -> str:
    """The paragraphs of a section in lines of at most so many characters, with tables and code spans left whole."""

    def lines(paragraph: str) -> str:
        if paragraph.startswith("|"):
            return paragraph
        whole = re.sub("`[^`]+`", lambda span: span[0].replace(" ", "\0"), paragraph)
        return textwrap.fill(whole, width, break_long_words=False, break_on_hyphens=False).replace("\0", " ")

    return "\n\n".join(map(lines, body.split("\n\n")))


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
