"""Drafts from n-grams, and the decision whether drafting pays.

A draft repeats what followed the last tokens earlier in the response, or in another response to the same prompt: prompt
lookup decoding (https://github.com/apoorvumang/prompt-lookup-decoding) with an index per group, as in
https://arxiv.org/abs/2411.04975. Sampled tokens do not depend on drafts.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from weakref import WeakValueDictionary

NGRAM = 3  # tokens that must have occurred before
HISTORY = 256  # tokens of a new text that are indexed
FIRST_LENGTH = 4  # tokens of a text's first draft
PROBED_TOKENS = 32  # last tokens of a response from which its acceptance length is estimated


class Group:
    """The responses to one prompt: the last occurrence of each n-gram, as a text and a position in it."""

    def __init__(self) -> None:
        self.occurrences: dict[tuple[int, ...], tuple[list[int], int]] = {}


class Text:
    """A prompt and its response so far, with drafts of at most `max_length` tokens."""

    def __init__(self, tokens: Sequence[int], group: Group, max_length: int) -> None:
        self._group = group
        self._max_length = max_length
        self._length = min(FIRST_LENGTH, max_length)  # of the next draft
        self._tokens: list[int] = []
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds and indexes tokens."""
        text, occurrences = self._tokens, self._group.occurrences
        for token in tokens:
            if len(text) >= NGRAM:
                occurrences[*text[-NGRAM:]] = text, len(text)
            text.append(token)

    def draft(self) -> list[int]:
        """What followed the last n-gram. A draft that reaches the end of its own text continues with itself."""
        source, start = self._group.occurrences.get(tuple(self._tokens[-NGRAM:]), ([], 0))
        draft = source[start : start + self._length]
        while source is self._tokens and len(draft) < self._length:
            draft.append(draft[len(draft) - (len(source) - start)])
        return draft

    def adapt(self, drafted: int, accepted: int) -> None:
        """Doubles the length of drafts while all tokens are accepted, else shortens it to the accepted ones."""
        if drafted:
            self._length = min(self._max_length, 2 * self._length) if accepted == drafted else max(1, accepted)


@dataclass(frozen=True)
class Update:
    """The last step of a response: its sampled tokens, and how many drafted tokens it verified.

    `read` returns the prompt, and the tokens of the response including the sampled ones.
    """

    request_id: str
    sampled: Sequence[int]
    drafted: int
    read: Callable[[], tuple[Sequence[int], Sequence[int]]]


class Drafter:
    """Drafts at most `max_length` tokens for each response of an engine."""

    def __init__(self, max_length: int) -> None:
        self._max_length = max_length
        self._texts: dict[str, Text] = {}
        self._groups: WeakValueDictionary[tuple[int, ...], Group] = WeakValueDictionary()

    def draft(self, updates: Sequence[Update]) -> list[list[int]]:
        """A draft for each response; it may be empty. Responses without an update are dropped."""
        self._texts = {update.request_id: self._updated(update) for update in updates}
        return [text.draft() for text in self._texts.values()]

    def _updated(self, update: Update) -> Text:
        text = self._texts.get(update.request_id)
        if text is not None:
            text.extend(update.sampled)
            text.adapt(update.drafted, len(update.sampled) - 1)
            return text
        prompt, response = update.read()
        key = tuple(prompt)
        group = self._groups.get(key) or Group()
        self._groups[key] = group
        return Text([*prompt, *response][-HISTORY:], group, self._max_length)


def acceptance_length(responses: Sequence[tuple[Sequence[int], Sequence[int]]], max_length: int) -> float:
    """The mean acceptance length, in tokens per step, that drafts would have had in the last tokens of the responses.

    Each is a prompt and its response so far; 1.0 without any.
    """
    groups: dict[tuple[int, ...], Group] = {}
    tokens, steps = 0, 0
    for prompt, response in responses:
        known = max(0, len(response) - PROBED_TOKENS)
        group = groups.setdefault(tuple(prompt), Group())
        text = Text([*prompt, *response[:known]][-HISTORY:], group, max_length)
        while known < len(response):
            draft = text.draft()
            pairs = enumerate(zip(draft, response[known:], strict=False))
            accepted = next((place for place, (drafted, token) in pairs if drafted != token), len(draft))
            sampled = response[known : known + accepted + 1]
            text.extend(sampled)
            text.adapt(len(draft), accepted)
            known, tokens, steps = known + len(sampled), tokens + len(sampled), steps + 1
    return tokens / steps if steps else 1.0


TIMED_STEPS = 15  # of a kind and batch size
ASSUMED_COST = 1.5  # before both kinds of steps were timed
MIN_COST = 1.05  # times of steps with very few responses vary


class StepTimes:
    """Seconds per step of an engine, with and without drafts, by batch size."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[bool, int], deque[float]] = defaultdict(lambda: deque(maxlen=TIMED_STEPS))

    def add(self, drafting: bool, responses: int, seconds: float) -> None:
        """Adds a step."""
        self._seconds[drafting, responses.bit_length()].append(seconds)

    def cost(self, responses: int) -> float:
        """The time of a step with drafts divided by that of a step without them, at about this batch size."""
        sizes = {size for _, size in self._seconds}
        known = [size for size in sizes if (False, size) in self._seconds and (True, size) in self._seconds]
        if not known:
            return ASSUMED_COST
        nearest = min(known, key=lambda size: abs(size - responses.bit_length()))
        # The median ignores a step that waited for something else.
        ratio = median(self._seconds[True, nearest]) / median(self._seconds[False, nearest])
        return max(MIN_COST, ratio)


# Steps without drafts before an engine checks whether they would pay. The pause doubles to `MAX_PAUSE` while they would
# not, and to `MAX_BACKOFF` after drafts that did not pay.
FIRST_PAUSE, MAX_PAUSE, MAX_BACKOFF = 16, 256, 1024
WINDOW = 16  # steps with drafts before an engine checks whether they paid
MARGIN = 1.1  # by which drafts must pay: a batch ends with the response that gets the fewest tokens


class Backoff:
    """Whether drafts pay: with them a response gets several tokens in a step, and a step takes longer."""

    def __init__(self) -> None:
        self.times = StepTimes()
        self._pause = self._backoff = FIRST_PAUSE
        self._steps = 0  # since the last decision
        self._tokens = 0.0  # of a response in these steps

    def count(self, tokens: float) -> None:
        """Counts a step in which responses got this many tokens on average."""
        self._steps += 1
        self._tokens += tokens

    def reset(self) -> None:
        """Resets the pause for a new batch."""
        self._steps, self._pause = 0, FIRST_PAUSE

    def is_due(self, drafting: bool) -> bool:
        """Whether the engine, which drafts or does not, decides now."""
        return self._steps >= (WINDOW if drafting else self._pause)

    def paid(self, responses: int) -> bool:
        """Whether the drafts since the last decision paid."""
        return self.will_pay(responses, self._tokens / self._steps)

    def will_pay(self, responses: int, acceptance_length: float) -> bool:
        """Whether drafts are expected to pay at this acceptance length."""
        return acceptance_length > MARGIN * self.times.cost(responses)

    def decide(self, drafting: bool, pays: bool) -> None:
        """Begins to count anew after an engine, which drafts or does not, decided."""
        self._steps, self._tokens = 0, 0.0
        if drafting:
            self._pause = self._backoff = FIRST_PAUSE if pays else min(2 * self._backoff, MAX_BACKOFF)
        else:
            self._pause = min(2 * self._pause, MAX_PAUSE)
