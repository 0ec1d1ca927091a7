"""Splits rows into parts with nearly equal token counts, for micro-batches and for ranks."""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class MicroBatchLimit:
    """The limit of one forward pass of a rank: `tokens` if set, else `rows`."""

    rows: int
    tokens: int | None = None

    @property
    def setting(self) -> str:
        """The name of the setting in force."""
        return "micro_batch_size" if self.tokens is None else "micro_batch_tokens"

    @property
    def value(self) -> int:
        """The limit's value."""
        return self.rows if self.tokens is None else self.tokens

    def with_value(self, value: int) -> "MicroBatchLimit":
        """The same setting with another value."""
        return replace(self, **{"rows" if self.tokens is None else "tokens": value})

    def of_ranks(self, ranks: int) -> "MicroBatchLimit":
        """The limit of a forward pass in which so many ranks compute a part of each row's tokens."""
        return self if self.tokens is None else replace(self, tokens=self.tokens * ranks)

    def of_each(self, ranks: int) -> "MicroBatchLimit":
        """The smallest limit of a rank whose `of_ranks` is at least this one."""
        return self if self.tokens is None else replace(self, tokens=math.ceil(self.tokens / ranks))

    def lowered(self, lengths: Sequence[int], total: int) -> "MicroBatchLimit | None":
        """A limit that about halves the largest part of these rows; None if that part is a single row.

        `total` is what all of them cost together: less than the sum of their lengths if they share prompts.
        """
        if self.tokens is None:
            largest = min(self.rows, len(lengths))
            return replace(self, rows=largest // 2) if largest > 1 else None
        tokens = min(self.tokens, total)
        return replace(self, tokens=max(tokens // 2, max(lengths))) if tokens > max(lengths) else None

    def parts_needed(self, lengths: Sequence[int]) -> int:
        """The smallest number of parts within the limit. A row longer than the limit is a part of its own."""
        if self.tokens is None:
            return math.ceil(len(lengths) / self.rows)
        limit, count = self.tokens, max(1, math.ceil(sum(lengths) / self.tokens))

        def exceeds(part: list[int]) -> bool:
            return len(part) > 1 and sum(lengths[row] for row in part) > limit

        while count < len(lengths) and any(map(exceeds, balanced(lengths, count))):
            count += 1
        return min(count, len(lengths))

    def split(self, lengths: Sequence[int], count: int) -> list[list[int]]:
        """Splits the rows into `count` parts and returns the row indices of each."""
        if self.tokens is not None:
            return balanced(lengths, count)
        size = math.ceil(len(lengths) / count)
        return [list(range(start, min(start + size, len(lengths)))) for start in range(0, len(lengths), size)]


def balanced(lengths: Sequence[int], count: int, equal_size: bool = False) -> list[list[int]]:
    """Splits rows into `count` non-empty parts with nearly equal total lengths.

    Uses the largest differencing method (Karmarkar and Karp 1982) for `count` parts: while there are several partial
    solutions, it takes the two with the largest difference between parts and merges the heaviest part of one with the
    lightest of the other, and so on.

    With `equal_size` every part has the same number of rows; the number of rows must be a multiple of `count`.

    Returns the row indices of each part in ascending order. The result is deterministic.
    """
    if not 0 < count <= len(lengths) or (equal_size and len(lengths) % count):
        raise ValueError(f"{len(lengths)} rows cannot be split into {count} parts (equal sizes: {equal_size})")
    # A solution is a list of `count` pairs (total length, rows), heaviest first. The heap yields the solution with the
    # largest difference between its parts.
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    if equal_size:
        solutions = [[(lengths[row], [row]) for row in order[i : i + count]] for i in range(0, len(order), count)]
    else:
        solutions = [[(lengths[row], [row]), *((0, []) for _ in range(count - 1))] for row in order]
    heap = [(parts[-1][0] - parts[0][0], number, parts) for number, parts in enumerate(solutions)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, number, lightest = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        merged = [(a + b, rows + more) for (a, rows), (b, more) in zip(lightest, reversed(other), strict=True)]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], number, merged))
    parts = [rows for _, rows in heap[0][2]]
    for empty in (part for part in parts if not part):
        empty.append(max(parts, key=len).pop())
    return sorted(sorted(part) for part in parts)
