"""Whether drafts pay: with them a response gets several tokens in a step, and a step takes longer."""

from trainer.rollout.speculation.step_times import StepTimes

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
