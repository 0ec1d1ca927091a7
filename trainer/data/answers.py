"""Numbers in texts, and answers as GSM8K writes them: the last line is `#### NUMBER`."""

import re
import unicodedata
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction

_MARK = "####"
# Markup, LaTeX and currencies, in this order.
_CLEANED = tuple(
    (re.compile(pattern), plain)
    for pattern, plain in (
        (r"<[|/]?[a-zA-Z_]+[|/]?>", " "),  # an end token
        ("[\u2212\u2013]", "-"),
        ("[\u00bc-\u00be\u2150-\u215e]", lambda match: f" {_vulgar(match[0])}"),
        (r"(?<=[0-9])(?:\{,\}|\\,|\\!|\\ )(?=[0-9])", ","),
        (r"\\[dtc]?frac\s*(?:\{([0-9.]+)\}|([0-9]))\s*(?:\{([0-9.]+)\}|([0-9]))", r" \1\2/\3\4"),
        (r"\\(?:times|cdot)(?![a-zA-Z])", "\u00d7"),
        (r"\\([%$])", r"\1"),
        (r"[$\u20ac\u00a3\u00a5]\s*|\b(?:USD|EUR|GBP)\b\s*", ""),
        (r"\\[a-zA-Z]+|\\.|[{}\[\]()<>\"`]|\*\*|__", " "),
    )
)
_MAGNITUDES = {"k": 3, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_VALUE = re.compile(
    r"""
    (?:(?<![\w.)])(?P<sign>[-+])[ ]?)?
    (?:(?P<whole>[0-9]+)\s+(?=[0-9]+/[0-9]))?
    (?P<number>(?:[0-9]{1,3}(?:[,' \u00a0\u2009\u202f][0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)
    (?:\s*/\s*(?P<denominator>[0-9]+(?:\.[0-9]+)?))?
    (?:\^\s*(?P<power>[0-9]{1,2})(?![0-9]))?
    (?:(?:[eE]|\s*[x\u00d7*]\s*10\s*\^\s*)(?P<exponent>[-+]?[0-9]{1,2})(?![0-9]))?
    (?:\s*(?P<magnitude>thousand|million|billion|trillion|(?<=[0-9])[kK])\b)?
    (?P<percent>\s*(?:%|percent\b))?
    """,
    re.VERBOSE,
)
# What makes a number a part of another value: `9 hours 30 minutes`, `9 or 10`, `9 + 3`, `9:30`.
_CONTINUED = re.compile(
    r"\s*(?:[a-zA-Z\u00b0][\w\u00b2\u00b3^.]*+\s*)?+"
    r"(?:(?:and|or|to|plus|minus|times|[-+*/x\u00d7\u00f7:,;&^])\s*)*+\.?[0-9]"
)
_EXPLAINED = re.compile(r"\s\(|[.,;]\s+(?=[^\W\d])|\b(?:because|since)\b")


def final_answer(text: str) -> str | None:
    """The number after the last `####`, like `1234`, `-0.5`, `1/3` or `50%`; None without one.

    Markup, a currency, a unit and words before the number are left out, and of `4 + 5 = 9` all but the result. A number
    that others continue, as in `9 or 10` and `9 + 3`, is none.
    """
    for line in final_lines(text):
        value = only_number(line)
        if value is not None:
            return value
    return None


def final_lines(text: str) -> Iterator[str]:
    """The lines that `####` begins, or the lines after it, from the last one on."""
    for part in reversed(text.split(_MARK)[1:]):
        yield part.strip().partition("\n")[0].strip()


def only_number(line: str) -> str | None:
    """The only number of a line, as `final_answer` returns it; None without one, or with several."""
    told = _EXPLAINED.split(line)[0]
    line = _cleaned(told if re.search("[0-9\u00bc-\u00be\u2150-\u215e]", told) else line)
    sides = [side for side in re.split("[=\u2248]", line) if re.search("[0-9]", side)]
    number = _VALUE.search(sides[-1]) if sides else None
    return None if number is None or _CONTINUED.match(sides[-1], number.end()) else _text(number)


def last_number(text: str) -> str | None:
    """The last number anywhere in the text, as `final_answer` returns it; None without one."""
    numbers = list(_VALUE.finditer(_cleaned(text)))
    return _text(numbers[-1]) if numbers else None


def _cleaned(text: str) -> str:
    for pattern, plain in _CLEANED:
        text = pattern.sub(plain, text)
    return text


def _text(number: re.Match[str]) -> str | None:
    """The value as plain text; None if it is out of bounds."""
    parts = number.groupdict()
    try:
        value = Fraction(re.sub(r"[^0-9.]", "", parts["number"])) / Fraction(parts["denominator"] or 1)
        value = (value + Fraction(parts["whole"] or 0)) ** int(parts["power"] or 1)
        value *= Fraction(10) ** (int(parts["exponent"] or 0) + _MAGNITUDES.get((parts["magnitude"] or "").lower(), 0))
        decimal = Decimal(value.numerator) / value.denominator
        plain = f"{decimal.normalize():f}" if Fraction(decimal) == value else str(value)
    except (ValueError, ZeroDivisionError):  # Python bounds the digits of numbers
        return None
    return ("-" if parts["sign"] == "-" and value else "") + plain + ("%" if parts["percent"] else "")


def _vulgar(character: str) -> Fraction:
    """The value of a character like \u00bd."""
    return Fraction(unicodedata.numeric(character)).limit_denominator(10)
