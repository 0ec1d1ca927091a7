"""Escapes control characters in untrusted text, such as a model's responses, for a terminal."""

import re

# Control characters other than line feed and tab, and those that reorder or break lines. Half a surrogate pair has no
# UTF-8.
_ACTIVE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """The text with each character that a terminal acts on in its Python form, like `\\x1b`."""
    return _ACTIVE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
