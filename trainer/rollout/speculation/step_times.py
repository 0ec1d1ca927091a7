"""How long an engine's steps take with and without drafts. A step with drafts gives a response several tokens."""

from collections import defaultdict, deque
from statistics import median

REMEMBERED = 15  # steps of a kind whose times count
ASSUMED_COST = 1.5  # before any step of one kind was timed
LEAST_COST = 1.05  # what a measurement may say at least: steps of very few responses vary


class StepTimes:
    """Seconds that an engine's steps took, with and without drafts, by how many responses they had."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[bool, int], deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))

    def add(self, drafting: bool, responses: int, seconds: float) -> None:
        """Notes one step."""
        self._seconds[drafting, responses.bit_length()].append(seconds)

    def cost(self, responses: int) -> float:
        """How many steps without drafts take as long as one with them, at about so many responses."""
        sizes = {size for _, size in self._seconds}
        known = [size for size in sizes if (False, size) in self._seconds and (True, size) in self._seconds]
        if not known:
            return ASSUMED_COST
        nearest = min(known, key=lambda size: abs(size - responses.bit_length()))
        # One of the last steps may have waited for something else; the median does not notice it.
        ratio = median(self._seconds[True, nearest]) / median(self._seconds[False, nearest])
        return max(LEAST_COST, ratio)
