"""A part of the rows of a run's files."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from trainer.config.sections.data import DataConfig


@dataclass(frozen=True)
class Subset:
    """`size` rows of all files together, or every row if it is 0 or less.

    A seed draws them at random, without one they are the first.
    """

    size: int = -1
    seed: int | None = None

    @classmethod
    def of_training(cls, settings: DataConfig, seed: int) -> Self:
        return cls(settings.train_max_samples, seed if settings.shuffle else None)

    @classmethod
    def of_validation(cls, settings: DataConfig, seed: int) -> Self:
        return cls(settings.validation_max_samples, seed if settings.shuffle else None)

    def rows(self, counts: Sequence[int]) -> list[list[int]]:
        """The row numbers to use of each file, in order, given how many rows each has."""
        total = sum(counts)
        chosen: Sequence[int] = range(total)
        if 0 < self.size < total:
            chosen = chosen[: self.size]
            if self.seed is not None:
                chosen = sorted(random.Random(f"{self.seed}/subset").sample(range(total), self.size))
        per_file: list[list[int]] = []
        start = 0
        for count in counts:
            per_file.append([row - start for row in chosen if start <= row < start + count])
            start += count
        return per_file


EVERY_ROW = Subset()
