"""Drafts of a response's next tokens: what followed its last tokens earlier, in it or in answers to the same prompt.

Prompt lookup decoding (https://github.com/apoorvumang/prompt-lookup-decoding) with an index over a group, as in
https://arxiv.org/abs/2411.04975. A draft is only a guess. What is sampled does not depend on it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

NGRAM = 3  # tokens that must have occurred before
HISTORY = 256  # tokens that are indexed of a text that is seen for the first time
FIRST = 4  # tokens of a text's first draft
LOOKED_AT = 32  # last tokens of a response that say how its next ones could be drafted


class Group:
    """The texts that answer one prompt, and where each n-gram occurred last in them."""

    def __init__(self) -> None:
        self.places: dict[tuple[int, ...], tuple[list[int], int]] = {}


class Text:
    """A prompt and the tokens of its response so far."""

    def __init__(self, tokens: Sequence[int], group: Group, most: int) -> None:
        self._group = group
        self._most = most
        self._length = min(FIRST, most)  # of the next draft
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

    def draft(self, rows: Sequence[Row]) -> list[list[int]]:
        """A draft for each response, empty where nothing is known. Those that are not among the rows are forgotten."""
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


def tokens_a_step(responses: Sequence[tuple[Sequence[int], Sequence[int]]], most: int) -> float:
    """The tokens that responses would have got in a step with drafts, on average, judged by their last tokens.

    Each is a prompt and its response so far; 1.0 without any.
    """
    groups: dict[tuple[int, ...], Group] = {}
    told, steps = 0, 0
    for prompt, response in responses:
        known = max(0, len(response) - LOOKED_AT)
        group = groups.setdefault(tuple(prompt), Group())
        text = Text([*prompt, *response[:known]][-HISTORY:], group, most)
        while known < len(response):
            draft = text.draft()
            pairs = enumerate(zip(draft, response[known:], strict=False))
            accepted = next((place for place, (guess, token) in pairs if guess != token), len(draft))
            new = response[known : known + accepted + 1]
            text.extend(new)
            text.learn(len(draft), accepted)
            known, told, steps = known + len(new), told + len(new), steps + 1
    return told / steps if steps else 1.0
