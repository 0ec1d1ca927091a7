"""Compressed host lists, as Slurm, Flux and ClusterShell write them: `node[01-03,07]-ib,r[1-9/2]n[1-4]`.

The first name decides which node is the head, so the parser is strict: Slurm's own reader guesses at an unclosed
bracket or a reversed range, this one raises an error. Order and duplicates stay as written. A step follows a slash, as
in ClusterShell.
"""

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass

MAXIMUM_HOSTS = 65_536
"""More than any cluster has; a longer expansion is a mistake or an attack (`n[0-9999999999]`)."""

LONGEST_NAME = 253
"""Characters in a DNS name (RFC 1035, 2.3.4, less the bytes that only the wire has)."""

_SHOWN = 40
"""Characters of a name in an error."""
_NAME = re.compile(r"[A-Za-z0-9_.-]*")
_RANGE = re.compile(r"(\d+)(?:-(\d+)(?:/(\d+))?)?", re.ASCII)
_LAST_NUMBER = re.compile(r"(.*?)(\d{1,18})(\D*)", re.ASCII | re.DOTALL)


class HostlistError(ValueError):
    """The text is not a host list; the message quotes the wrong part."""


def expand(text: str) -> list[str]:
    """Expand a host list into host names, in the order written.

    Raises HostlistError for malformed input, names of more than LONGEST_NAME characters, and more than MAXIMUM_HOSTS
    names.
    """
    hosts: list[str] = []
    for item in _split(text):
        if "[" in item or not item or not _NAME.fullmatch(item):
            hosts += _expand_item(item, MAXIMUM_HOSTS - len(hosts))
        else:  # most items of a long list: skip the slow path
            hosts.append(item)
    if len(hosts) > MAXIMUM_HOSTS:
        raise HostlistError(f"more than {MAXIMUM_HOSTS} hosts")
    if len(longest := max(hosts, key=len)) > LONGEST_NAME:
        raise HostlistError(
            f"{longest[:_SHOWN]!r}… has {len(longest)} characters, a host name has at most {LONGEST_NAME}"
        )
    return hosts


def _split(text: str) -> list[str]:
    """The items between the commas outside brackets."""
    if "[" not in text and "]" not in text:
        return text.split(",")
    items: list[str] = []
    begin, inside = 0, False
    for match in re.finditer(r"[\[\],]", text):
        character = match[0]
        if character == ",":
            if not inside:
                items.append(text[begin : match.start()])
                begin = match.end()
            continue
        if inside == (character == "["):
            raise HostlistError(f"unexpected {character!r} at character {match.end()}")
        inside = not inside
    if inside:
        raise HostlistError("'[' is never closed")
    return [*items, text[begin:]]


def _expand_item(item: str, room: int) -> list[str]:
    """The names of one item with any number of brackets: `rack[1-2]node[01-16]-ib`."""
    literals = re.split(r"\[.*?\]", item)
    for literal in literals:
        if not _NAME.fullmatch(literal):
            raise HostlistError(f"{literal!r} is not part of a host name")
    if not item:
        raise HostlistError("a host name is empty")
    brackets: list[list[str]] = []
    count = 1
    for ranges in re.findall(r"\[(.*?)\]", item):
        brackets.append(_expand_ranges(ranges, room))
        count *= len(brackets[-1])
        if count > room:
            raise HostlistError(f"more than {MAXIMUM_HOSTS} hosts")
    if count > room:
        raise HostlistError(f"more than {MAXIMUM_HOSTS} hosts")
    if not brackets:
        return [item]
    *earlier, last = brackets
    # Slurm's order: the last number counts fastest, then the first, the second and so on.
    ends = [f"{number}{literals[-1]}" for number in last]
    fronts = [
        "".join(itertools.chain.from_iterable(zip(literals, reversed(numbers), strict=False))) + literals[-2]
        for numbers in itertools.product(*reversed(earlier))
    ]
    return [front + end for front in fronts for end in ends]


def _expand_ranges(ranges: str, room: int) -> list[str]:
    """The numbers in one bracket: `01-03,7,10-20/5`. They are zero-padded to the width of a range's first number."""
    numbers: list[str] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise HostlistError(f"{part!r} is not a number or a range")
        first, last, step = match[1], match[2] or match[1], match[3] or "1"
        if len(first) > 18 or len(last) > 18 or len(step) > 18:
            raise HostlistError(f"{part!r} has too many digits")
        if int(step) == 0:
            raise HostlistError(f"the step of {part!r} is 0")
        if int(last) < int(first):
            raise HostlistError(f"the range {part!r} runs backwards")
        chosen = range(int(first), int(last) + 1, int(step))
        if len(chosen) > room - len(numbers):
            raise HostlistError(f"more than {MAXIMUM_HOSTS} hosts")
        numbers += map(f"%0{len(first)}d".__mod__, chosen)  # twice as fast as an f-string for each number
    return numbers


@dataclass
class _Run:
    """Consecutive names that differ only in their last number."""

    prefix: str
    suffix: str
    ranges: list[tuple[str, str]]

    def takes(self, prefix: str, number: str, suffix: str) -> bool:
        """Add the name if it has this run's prefix and suffix; whether it was added."""
        if (prefix, suffix) != (self.prefix, self.suffix):
            return False
        first, last = self.ranges[-1]
        follows = int(number) == int(last) + 1
        # A range pads all its numbers to the width of its first.
        if follows and number == f"{int(number):0{len(first)}d}":
            self.ranges[-1] = (first, number)
        else:
            self.ranges.append((number, number))
        return True

    def __str__(self) -> str:
        texts = [first if first == last else f"{first}-{last}" for first, last in self.ranges]
        single = texts == [self.ranges[0][0]]
        return f"{self.prefix}{texts[0] if single else '[' + ','.join(texts) + ']'}{self.suffix}"


def compress(hosts: Iterable[str]) -> str:
    """A short host list that expands to exactly these names, in this order.

    Adjacent names that differ only in their last number share a bracket.
    """
    runs: list[_Run | str] = []
    for host in hosts:
        match = _LAST_NUMBER.fullmatch(host)
        if match is None:
            runs.append(host)
            continue
        prefix, number, suffix = match[1], match[2], match[3]
        newest = runs[-1] if runs else None
        if not isinstance(newest, _Run) or not newest.takes(prefix, number, suffix):
            runs.append(_Run(prefix, suffix, [(number, number)]))
    return ",".join(map(str, runs))
