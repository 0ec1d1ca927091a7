"""Recorded routes: the experts that tokens of some rows chose in each layer of a model with experts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Choices: TypeAlias = npt.NDArray[Any]
"""The experts of consecutive tokens, [tokens, layers, choices] uint8 or int16."""


class Stored(NamedTuple):
    """Choices of so many tokens in the object store."""

    reference: Any
    tokens: int


@dataclass(frozen=True)
class Segment:
    """The choices of a row's tokens from `first` on, which counts from the first token of the prompt."""

    first: int
    choices: Choices | Stored

    @property
    def end(self) -> int:
        """The token after the last one."""
        return self.first + (self.choices.tokens if isinstance(self.choices, Stored) else len(self.choices))


@dataclass(frozen=True)
class Routes:
    """The segments of each row; tokens in none of them have no record.

    Rows that share a prompt may share the array of its choices, which is then stored and sent once.
    """

    segments: Sequence[Sequence[Segment]]

    def __len__(self) -> int:
        return len(self.segments)

    def rows(self, index: Sequence[int]) -> "Routes":
        """The selected rows."""
        return Routes([self.segments[row] for row in index])

    def stored(self, put: Callable[[Choices], Any]) -> "Routes":
        """The same with the choices in the object store, each array once. `put` returns a reference to an array."""
        kept: dict[int, Stored] = {}

        def moved(part: Segment) -> Segment:
            if isinstance(part.choices, Stored):
                return part
            if id(part.choices) not in kept:
                kept[id(part.choices)] = Stored(put(part.choices), len(part.choices))
            return replace(part, choices=kept[id(part.choices)])

        return Routes([[moved(part) for part in parts] for parts in self.segments])

    def fetched(self, get: Callable[[list[Any]], list[Choices | None]]) -> "Routes":
        """The same with the choices in memory. `get` returns what references stand for, None for what is lost."""
        parts = [part.choices for parts in self.segments for part in parts if isinstance(part.choices, Stored)]
        references = list(dict.fromkeys(stored.reference for stored in parts))
        choices = dict(zip(references, get(references), strict=True))

        def loaded(part: Segment) -> Segment | None:
            if not isinstance(part.choices, Stored):
                return part
            arrived = choices[part.choices.reference]
            return None if arrived is None else replace(part, choices=arrived)

        return Routes([[new for part in parts if (new := loaded(part)) is not None] for parts in self.segments])

    def with_prompts_of_others(self, prompts: Sequence[Sequence[int]]) -> "Routes":
        """The same, where each row whose prompt has no whole record also has what others of the prompt recorded of it.

        No segment may reach across the end of the prompt.
        """
        of_prompts: dict[tuple[int, ...], list[Segment]] = {}
        for prompt, parts in zip(prompts, self.segments, strict=True):
            known = of_prompts.setdefault(tuple(prompt), [])
            known += [part for part in parts if part.end <= len(prompt) and _adds(part, known)]
        return Routes(
            [
                [*of_prompts[tuple(prompt)], *(part for part in parts if part.end > len(prompt))]
                for prompt, parts in zip(prompts, self.segments, strict=True)
            ]
        )

    def unrecorded(self, lengths: Sequence[int]) -> float:
        """The share of tokens without a record, of rows with so many tokens, without the last token of each: engines
        do not compute it."""
        missing = 0
        for length, parts in zip(lengths, self.segments, strict=True):
            known = np.zeros(length - 1, np.bool_)
            for part in parts:
                known[part.first : part.end] = True
            missing += int(np.count_nonzero(~known))
        return missing / max(1, sum(lengths) - len(lengths))

    def in_memory(self) -> Iterator[tuple[int, int, Choices]]:
        """The segments of `fetched` rows, the last first: row, first token and choices of each."""
        for row, parts in enumerate(self.segments):
            for part in reversed(parts):
                assert not isinstance(part.choices, Stored), "the choices are still in the object store"
                yield row, part.first, part.choices


def _adds(part: Segment, known: Sequence[Segment]) -> bool:
    """Whether a segment has tokens that none of the others has."""
    return not any(other.first <= part.first and part.end <= other.end for other in known)


def smallest_type(experts: int) -> npt.DTypeLike:
    """The type that holds the numbers of so many experts, and one more that stands for none: its largest."""
    return np.uint8 if experts <= np.iinfo(np.uint8).max else np.int16
