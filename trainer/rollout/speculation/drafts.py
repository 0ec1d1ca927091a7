"""Drafts of a response's next tokens: what followed its last tokens earlier, in it or in answers to the same prompt.

Prompt lookup decoding (https://github.com/apoorvumang/prompt-lookup-decoding) with an index over a group, as in
https://arxiv.org/abs/2411.04975. A draft is only a guess. What is sampled does not depend on it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

NGRAM = 3  # tokens that must have occurred before
HISTORY = 256  # tokens that are indexed of a text that is seen for the first time

# In decoding steps: what drafting costs an engine, and what it may lose before it pauses.
SEARCH, VERIFY, ALLOWANCE = 0.02, 0.2, 4.0
FIRST_PAUSE, LONGEST_PAUSE = 512, 8192


class Group:
    """The texts that answer one prompt, and where each n-gram occurred last in them."""

    def __init__(self) -> None:
        self.places: dict[tuple[int, ...], tuple[list[int], int]] = {}


class Text:
    """A prompt and the tokens of its response so far."""

    def __init__(self, tokens: Sequence[int], group: Group, most: int) -> None:
        self._group = group
        self._most = most
        self._length = 1  # of the next draft
        self.tokens: list[int] = []
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds tokens and indexes what they follow."""
        own, places = self.tokens, self._group.places
        for token in tokens:
            if len(own) >= NGRAM:
                places[*own[-NGRAM:]] = own, len(own)
            own.append(token)

    def draft(self) -> list[int]:
        """What followed the last n-gram; where that reaches the text's own end, the draft continues it."""
        source, start = self._group.places.get(tuple(self.tokens[-NGRAM:]), ([], 0))
        found = source[start : start + self._length]
        while source is self.tokens and len(found) < self._length:
            found.append(found[len(found) - (len(source) - start)])
        return found

    def learn(self, drafted: int, accepted: int) -> None:
        """Drafts grow while all of their tokens are accepted."""
        if drafted:
            self._length = min(self._most, 2 * self._length) if accepted == drafted else max(1, accepted)


class Payoff:
    """Pauses drafting where it does not pay, by counts alone, so that all ranks of an engine decide alike.

    The balance is what drafts have saved and cost, in steps. Pauses grow while drafts keep losing. One ends early if
    at most half of the responses are left: a step has become cheaper, and the longest responses repeat themselves most.
    """

    def __init__(self) -> None:
        self._balance = 0.0
        self._pause = FIRST_PAUSE
        self._left = 0
        self._responses = 0

    def paused(self, responses: int) -> bool:
        """Whether this step, with so many responses, goes without drafts."""
        if self._left and 2 * responses > self._responses:
            self._left -= 1
            return True
        self._left = 0
        return False

    def count(self, responses: int, drafted: int, accepted: int) -> None:
        """A step of so many responses which verified drafted tokens."""
        gain = accepted / responses - (VERIFY if drafted else SEARCH)
        self._balance = min(self._balance + gain, ALLOWANCE)
        if self._balance >= ALLOWANCE:
            self._pause = FIRST_PAUSE
        if self._balance <= -ALLOWANCE:
            self._left, self._responses = self._pause, responses
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self._balance = 1 - ALLOWANCE  # after the pause it is tried for the loss of one step


@dataclass(frozen=True)
class Row:
    """A response in a step: its name, the tokens that the step sampled, and how many drafted ones it verified.

    `read` returns the prompt, and the tokens of the response with the new ones.
    """

    name: str
    new: Sequence[int]
    drafted: int
    read: Callable[[], tuple[Sequence[int], Sequence[int]]]

    @property
    def accepted(self) -> int:
        """Drafted tokens that the step accepted: all that it sampled but the last."""
        return len(self.new) - 1


class Drafter:
    """Drafts at most `most` tokens for each response of an engine."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._texts: dict[str, Text] = {}
        self._groups: WeakValueDictionary[tuple[int, ...], Group] = WeakValueDictionary()
        self._payoff = Payoff()

    def paused(self, responses: int) -> bool:
        """Whether this step goes without drafts. Texts are read again after a pause."""
        paused = self._payoff.paused(responses)
        if paused:
            self._texts = {}
        return paused

    def draft(self, rows: Sequence[Row]) -> list[list[int]]:
        """A draft for each response, empty where nothing is known."""
        self._payoff.count(len(rows), sum(row.drafted for row in rows), sum(row.accepted for row in rows))
        self._texts = {row.name: self._updated(row) for row in rows}
        return [self._texts[row.name].draft() for row in rows]

    def _updated(self, row: Row) -> Text:
        text = self._texts.get(row.name)
        if text is not None:
            text.extend(row.new)
            text.learn(row.drafted, row.accepted)
            return text
        prompt, response = row.read()
        key = tuple(prompt)
        group = self._groups.get(key) or Group()
        self._groups[key] = group
        return Text([*prompt, *response][-HISTORY:], group, self._most)
