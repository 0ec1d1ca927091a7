"""Answers as GSM8K writes them: the last line is `#### NUMBER`."""

import re

# `1,234.50`, `-7`, `.25`. Commas must separate groups of three digits. \u2212 is the minus sign of typesetting.
NUMBER = r"[-+\u2212]?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
_SIGN, _UNSIGNED = NUMBER.split("?", 1)
_FINAL_ANSWER = re.compile(rf"####[^\S\n]*({_SIGN}?\$?{_UNSIGNED}|\${NUMBER})(?![0-9,]*[0-9])")
_NUMBER = re.compile(NUMBER)


def final_answer(text: str) -> str | None:
    """The number after the last `####`, as written but without a dollar sign and with a plain minus; None without one.

    White space before the number may be of any kind, no-break spaces included.
    """
    found = _FINAL_ANSWER.findall(text)
    return _plain(found[-1]) if found else None


def last_number(text: str) -> str | None:
    """The last number anywhere in the text, as `final_answer` returns it; None without one."""
    found = _NUMBER.findall(text)
    return _plain(found[-1]) if found else None


def _plain(number: str) -> str:
    return number.replace("$", "").replace("\u2212", "-")
