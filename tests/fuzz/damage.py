"""Damaged inputs: text, JSON trees and bytes, made from valid ones by a generator of random numbers."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

SCALARS: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 2**31, 2**63, 10**400, 0.5, -0.0, 1e308, float("inf"), float("nan")),
    *("", " ", "0", "-1", "1e999", "null", "~", "a", "\x00", "\ud800", "٣", "9" * 5000, "{}", "[", "a=b", "../..", "é"),
)
PIECES = (
    *",:=[]{}/@#-*&01$~'\"\\é٣",
    *("--", "99999999999", "nan", "null", "true", "${", "sha256:"),
    *("", " ", "\n", "\t", "\x00", "\u2028", "\ud800", "9" * 5000),
)


@dataclass(frozen=True)
class Target:
    """A parser. `make` draws an input, `read` parses it; `refusals` are the errors that a user sees without a
    traceback."""

    name: str
    make: Callable[[Random], Any]
    read: Callable[[Any], object]
    refusals: tuple[type[Exception], ...]

    def attempt(self, random: Random) -> None:
        """Reads one input. Any error but a refusal is a finding."""
        given = self.make(random)
        try:
            self.read(given)
        except self.refusals:
            pass
        except Exception as error:
            error.add_note(f"{self.name} read {given!r:.2000}")
            raise


def text(random: Random, seeds: Sequence[str], most: int = 4) -> str:
    """A valid text with up to `most` changes: cuts, insertions, repetitions, and parts of another one."""
    damaged = random.choice(seeds)
    for _ in range(random.randint(0, most)):
        start = random.randint(0, len(damaged))
        end = min(len(damaged), start + random.choice((0, 1, 1, 2, 8)))
        match random.randrange(4):
            case 0:
                middle = random.choice(PIECES)
            case 1:
                middle = ""
            case 2:
                middle = damaged[start:end] * random.choice((2, 3))
            case _:
                other = random.choice(seeds)
                at = random.randint(0, len(other))
                middle = other[at : at + random.randint(0, 12)]
        damaged = damaged[:start] + middle + damaged[end:]
    return damaged


def octets(random: Random, seeds: Sequence[str]) -> bytes:
    """A damaged text as bytes, some of them not UTF-8."""
    damaged = bytearray(text(random, seeds).encode("utf-8", "surrogatepass"))
    if damaged and random.random() < 0.3:
        damaged[random.randrange(len(damaged))] = random.randrange(256)
    return bytes(damaged)


def value(random: Random, depth: int = 2) -> Any:
    """Any JSON value, and numbers and texts that JSON cannot hold."""
    kind = random.randrange(6)
    if depth and kind == 0:
        return [value(random, depth - 1) for _ in range(random.randrange(3))]
    if depth and kind == 1:
        return {str(random.choice(SCALARS))[:20]: value(random, depth - 1) for _ in range(random.randrange(3))}
    return random.choice(SCALARS)


def tree(random: Random, seeds: Sequence[Any], most: int = 3) -> Any:
    """A valid tree with up to `most` values replaced, removed or renamed."""
    root = [copy.deepcopy(random.choice(seeds))]
    for _ in range(random.randint(0, most)):
        parent: Any = root
        key: Any = 0
        while isinstance(parent[key], list | dict) and parent[key] and random.random() < 0.8:
            parent = parent[key]
            key = random.choice(list(parent)) if isinstance(parent, dict) else random.randrange(len(parent))
        change = random.randrange(4)
        if change == 0 and parent is not root:
            del parent[key]
        elif change == 1 and isinstance(parent, dict):
            parent[text(random, [str(key)], 1)] = parent.pop(key)
        else:
            parent[key] = value(random)
    return root[0]
