"""Recorded routes: the experts that tokens of some rows chose in each layer of a model with experts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Choices = npt.NDArray[np.integer[Any]]
"""The experts of consecutive tokens, [tokens, layers, choices] uint8 or int16."""


class Stored(NamedTuple):
    """Choices in the object store: the place in a list of arrays that `reference` stands for."""

    reference: Any
    place: int


@dataclass(frozen=True)
class Segment:
    """The choices of a row's tokens from `first` on, which counts from the first token of the prompt."""

    first: int
    choices: Choices | Stored


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

    def fetched(self, get: Callable[[list[Any]], list[Any]]) -> "Routes":
        """The same with all choices in memory. `get` returns what references stand for, None for what is lost."""
        wanted = {part.choices.reference: None for part in self._all() if isinstance(part.choices, Stored)}
        arrays = dict(zip(wanted, get(list(wanted)), strict=True)) if wanted else {}

        def loaded(part: Segment) -> Segment | None:
            if not isinstance(part.choices, Stored):
                return part
            stored = arrays[part.choices.reference]
            return None if stored is None else replace(part, choices=stored[part.choices.place])

        rows = [[loaded(part) for part in parts] for parts in self.segments]
        return Routes([[part for part in parts if part is not None] for parts in rows])

    def stored(self, put: Callable[[list[Choices]], Any]) -> "Routes":
        """The same with all choices in the object store, each array once. `put` stores a list of arrays."""
        places: dict[int, int] = {}
        arrays: list[Choices] = []
        for part in self._all():
            if not isinstance(part.choices, Stored) and id(part.choices) not in places:
                places[id(part.choices)] = len(arrays)
                arrays.append(part.choices)
        if not arrays:
            return self
        reference = put(arrays)

        def moved(part: Segment) -> Segment:
            if isinstance(part.choices, Stored):
                return part
            return replace(part, choices=Stored(reference, places[id(part.choices)]))

        return Routes([[moved(part) for part in parts] for parts in self.segments])

    def in_memory(self) -> Iterator[tuple[int, int, Choices]]:
        """The segments of `fetched` rows: row, first token and choices of each."""
        for row, parts in enumerate(self.segments):
            for part in parts:
                assert not isinstance(part.choices, Stored), "the choices are still in the object store"
                yield row, part.first, part.choices

    def _all(self) -> Iterator[Segment]:
        return (part for parts in self.segments for part in parts)


def smallest_type(experts: int) -> npt.DTypeLike:
    """The type that holds the numbers of so many experts, and one more that stands for none: its largest."""
    return np.uint8 if experts <= np.iinfo(np.uint8).max else np.int16
