"""Every error text that the troubleshooting page quotes below a symptom is in the code: reword a message there too."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
OTHERS = {"Connection refused", "CUDA out of memory", "libfabric.so.1", "libnccl-net.so"}
"""Quoted texts that are not Slipway's own."""


def texts() -> list[str]:
    """All strings of the code; an f-string is split at its fields."""
    return [
        node.value
        for room in ("buildkit", "entrypoints", "trainer")
        for file in (ROOT / room).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


TEXTS = texts()
QUOTED = [
    text
    for line in re.findall(r"^> (.*)$", PAGE, re.MULTILINE)
    for text in re.findall(r"`([^`]+)`", line)
    if text not in OTHERS
]


@pytest.mark.parametrize("message", QUOTED)
def test_quoted_message_is_in_the_code(message: str) -> None:
    parts = [part for part in message.split("…") if len(part.strip(" :/,.")) > 2]
    assert parts, f"{message!r} quotes nothing that can be searched for"
    for part in parts:
        assert any(part.strip() in text for text in TEXTS), f"no message of the code contains {part.strip()!r}"


@pytest.mark.parametrize("symptom", ["It hangs", "CUDA out of memory", "Reward stays 0", "NaN", "401 from the Hub"])
def test_what_people_search_for_is_a_heading_with_its_message(symptom: str) -> None:
    assert re.search(rf"^### {symptom}\n\n> `", PAGE, re.MULTILINE)
