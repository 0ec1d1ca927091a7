"""Answers as GSM8K writes them: the last line is `#### NUMBER`."""

import re

# `#### 1,234.50`. Commas must separate groups of three digits.
NUMBER = r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?"
_FINAL_ANSWER = re.compile(rf"####[^\S\n]*\$?({NUMBER})(?![\d,]*\d)", re.ASCII)


def final_answer(text: str) -> str | None:
    """The number after the last `####`, as written; None if no number follows a `####`."""
    found = _FINAL_ANSWER.findall(text)
    return found[-1] if found else None
