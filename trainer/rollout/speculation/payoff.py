"""Whether drafts pay: with them a response gets several tokens in a step, and a step takes longer."""

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


# Steps without drafts before an engine looks whether they would pay, which double up to `PAUSE` while they would not.
# After they did not, it looks again later and later.
FIRST_PAUSE, PAUSE, LONGEST_PAUSE = 16, 256, 1024
WINDOW = 16  # steps with drafts after which it looks whether they paid
MARGIN = 1.1  # by which drafts must pay: a batch ends with the response that gets the fewest tokens


class Payoff:
    """What the steps of an engine brought and cost since it last decided whether it drafts."""

    def __init__(self) -> None:
        self.times = StepTimes()
        self._pause = self._setback = FIRST_PAUSE
        self._steps = 0
        self._gained = 0.0  # tokens that a response got in them on average
        self._promised = 1.0  # tokens a step when drafts last began
        self._kept = 1.0  # share of the promised tokens that came

    def count(self, tokens: float) -> None:
        """Counts a step in which a response got so many tokens on average."""
        self._steps += 1
        self._gained += tokens

    def look_soon(self) -> None:
        """Forgets how long drafts did not seem to pay: other responses come."""
        self._steps, self._pause = 0, FIRST_PAUSE

    def is_due(self, drafting: bool) -> bool:
        """Whether the engine decides now, which drafts or does not."""
        return self._steps >= (WINDOW if drafting else self._pause)

    def paid(self, responses: int) -> bool:
        """Whether drafts paid, with about so many responses; remembers how much of their promise they kept."""
        gain = self._gained / self._steps
        self._kept = min(1.0, gain / self._promised)
        return gain > MARGIN * self.times.cost(responses)

    def will_pay(self, responses: int, promised: float) -> bool:
        """Whether drafts will pay that promise so many tokens of a response in a step."""
        self._promised = promised
        pays = self._kept * promised > MARGIN * self.times.cost(responses)
        self._kept += (1 - self._kept) / 4  # text changes: it is tried again in the end
        return pays

    def decide(self, drafting: bool, pays: bool) -> None:
        """Begins to count anew, after an engine that drafts or does not found out whether it pays."""
        self._steps, self._gained = 0, 0.0
        if drafting:
            self._pause = self._setback = FIRST_PAUSE if pays else min(2 * self._setback, LONGEST_PAUSE)
        else:
            self._pause = min(2 * self._pause, PAUSE)
