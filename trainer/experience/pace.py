"""Whether an asynchronous learner waits for its responses, and how far ahead they would have to start."""

import logging
import math
import time
from collections import deque
from collections.abc import Callable

logger = logging.getLogger(__name__)

WAITS = 0.2  # share of the time; nothing is said of shorter waits


class Pace:
    """Follows when the responses of each step begin, end and are learned from. Says once if the learner waits.

    Responses begin `max_staleness` updates before the step that learns from them. If the longest take more time than
    these updates, the learner waits for them in one step of every `max_staleness + 1`. `silent` is for engines on the
    learner's GPUs, for which it waits in any case.
    """

    def __init__(self, max_staleness: float, clock: Callable[[], float] = time.monotonic, silent: bool = False) -> None:
        self._max_staleness = max_staleness
        self._clock = clock
        self._begun: dict[int, float] = {}
        self._lasted: dict[int, float] = {}
        self._taken: float | None = None
        # Of the last steps, which are a cycle: seconds in all, seconds of waiting, and what their responses took.
        self._steps = deque[tuple[float, float, float]](maxlen=math.ceil(max_staleness) + 1)
        self._silent = silent

    def begins(self, step: int) -> None:
        self._begun[step] = self._clock()

    def ends(self, step: int) -> None:
        """All responses of a step have ended. Nothing is known of those that an earlier process began."""
        if step in self._begun:
            self._lasted[step] = self._clock() - self._begun.pop(step)

    def taken(self, step: int, waited: float) -> None:
        """The learner has a step's responses, for which it waited so many seconds."""
        now, before = self._clock(), self._taken
        self._taken = now
        lasted = self._lasted.pop(step, 0.0)
        if before is None:  # it waits for the first ones in any case
            return
        self._steps.append((now - before, waited, lasted))
        if len(self._steps) == self._steps.maxlen and not self._silent:
            self._look()

    def _look(self) -> None:
        elapsed, waited, lasted = (list(column) for column in zip(*self._steps, strict=True))
        learning = (sum(elapsed) - sum(waited)) / len(elapsed)
        if sum(waited) < WAITS * sum(elapsed) or learning <= 0:
            return
        needed = math.ceil(max(lasted) / learning)
        if needed <= self._max_staleness:
            return
        self._silent = True
        logger.info(
            "the learner waits for responses %.0f %% of the time: those of a step take up to %.3g s, and it learns "
            "from them in %.3g s. trainer.max_staleness=%d instead of %g would let them begin early enough; more GPUs "
            "in device_mapping.rollout make them end sooner",
            100 * sum(waited) / sum(elapsed),
            max(lasted),
            learning,
            needed,
            self._max_staleness,
        )
