"""Slurm's compressed host lists: `node[01-03,07]-ib,login1`.

The parser is strict, because the first name decides where the head is: what Slurm's own reader would guess at
(an unclosed bracket, a reversed range) is an error here. Order and duplicates are kept as written.
"""

import itertools
import re

MAXIMUM_HOSTS = 65_536
"""More names than any cluster has; a longer expansion is a mistake or a bomb (`n[0-9999999999]`)."""

_NAME = re.compile(r"[A-Za-z0-9_.-]*")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)


class HostlistError(ValueError):
    """The text is not a host list; the message says where it goes wrong."""


def expand(text: str) -> list[str]:
    """Expand a host list into host names, in the order written.

    Raises HostlistError for malformed input and for more than MAXIMUM_HOSTS names.
    """
    hosts: list[str] = []
    for item in _split(text):
        hosts += _expand_item(item, MAXIMUM_HOSTS - len(hosts))
    return hosts


def _split(text: str) -> list[str]:
    """Split at the commas outside brackets."""
    items = [""]
    inside = False
    for position, character in enumerate(text, start=1):
        if character == "," and not inside:
            items.append("")
            continue
        if character in "[]":
            if inside == (character == "["):
                raise HostlistError(f"unexpected {character!r} at character {position}")
            inside = not inside
        items[-1] += character
    if inside:
        raise HostlistError("'[' is never closed")
    return items


def _expand_item(item: str, room: int) -> list[str]:
    """Expand one name with any number of brackets: `rack[1-2]node[01-16]-ib`."""
    literals = re.split(r"\[.*?\]", item)
    for literal in literals:
        if not _NAME.fullmatch(literal):
            raise HostlistError(f"{literal!r} is not part of a host name")
    if not item:
        raise HostlistError("a host name is empty")
    choices = [[literals[0]]]
    count = 1
    for ranges, literal in zip(re.findall(r"\[(.*?)\]", item), literals[1:], strict=True):
        numbers = _expand_ranges(ranges, room)
        count *= len(numbers)
        if count > room:
            raise HostlistError(f"more than {MAXIMUM_HOSTS} hosts")
        choices += [numbers, [literal]]
    if count > room:
        raise HostlistError(f"more than {MAXIMUM_HOSTS} hosts")
    return ["".join(parts) for parts in itertools.product(*choices)]


def _expand_ranges(ranges: str, room: int) -> list[str]:
    """Expand the inside of one bracket: `01-03,7`; zero padding is as wide as the first number."""
    numbers: list[str] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise HostlistError(f"{part!r} is not a number or a range")
        first, last = match[1], match[2] or match[1]
        if len(first) > 18 or len(last) > 18:
            raise HostlistError(f"{part!r} has too many digits")
        if int(last) < int(first):
            raise HostlistError(f"the range {part!r} runs backwards")
        if int(last) - int(first) >= room - len(numbers):
            raise HostlistError(f"more than {MAXIMUM_HOSTS} hosts")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers
