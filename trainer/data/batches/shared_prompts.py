"""Divides rows so that rows with the same prompt stay together and a pass computes their prompt once.

A group is a list of rows with one prompt. It costs the tokens of its prompt once, and those of all its responses.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.data.batches.partition import balanced

Group = list[int]


@dataclass(frozen=True)
class SharedPrompts:
    """The groups of a batch. `lengths` and `prompt_lengths` are the tokens of each row and of its prompt."""

    groups: list[Group]
    lengths: Sequence[int]
    prompt_lengths: Sequence[int]

    def cost(self, group: Group) -> int:
        """The tokens that a pass over the group computes."""
        return sum(self.lengths[row] for row in group) - (len(group) - 1) * self.prompt_lengths[group[0]]

    def within(self, tokens: int) -> list[Group]:
        """The groups, divided where they cost more than `tokens`. A longer row is a group of its own."""
        pieces: list[Group] = []
        for group in self.groups:
            part: Group = []
            for row in group:
                if part and self.cost([*part, row]) > tokens:
                    pieces.append(part)
                    part = []
                part.append(row)
            pieces.append(part)
        return pieces

    def shards(self, count: int) -> list[Group]:
        """The rows of each of `count` data groups: nearly equal costs, and equally many rows if `count` divides them.

        Larger pieces of groups save more, smaller ones balance better. Pieces have equal sizes; of all sizes the one is
        taken with the lightest heaviest data group.
        """
        rows = sum(map(len, self.groups))
        common = math.gcd(*map(len, self.groups))
        options: list[tuple[int, list[Group]]] = []
        for size in (size for size in range(common, 0, -1) if common % size == 0):
            if rows % count == 0 and rows // size % count:
                continue
            pieces = [group[start : start + size] for group in self.groups for start in range(0, len(group), size)]
            pieces += [[]] * (-len(pieces) % count)
            costs = [self.cost(piece) if piece else 0 for piece in pieces]
            parts = balanced(costs, count, equal_size=True)
            heaviest = max(sum(costs[piece] for piece in part) for part in parts)
            options.append((heaviest, [sorted(row for piece in part for row in pieces[piece]) for part in parts]))
        return min(options, key=lambda option: option[0])[1]


def halved(groups: list[Group], count: int) -> list[Group]:
    """The groups, the largest halved until there are `count`. There must be as many rows."""
    groups = list(groups)
    while len(groups) < count:
        largest = groups.pop(max(range(len(groups)), key=lambda number: len(groups[number])))
        groups += [largest[: len(largest) // 2], largest[len(largest) // 2 :]]
    return groups
