"""Steady steps in a row, and what they found that vLLM's records do not say yet.

To count a token in vLLM's records takes Python a microsecond, and a step of a thousand responses a millisecond or more.
So tokens wait in arrays, and go to the records of a response several at once: when it fills a block, when it ends, and
when vLLM is to look at it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
from vllm.v1.request import RequestStatus

WAITING_STEPS = 256  # whose tokens wait at most


@dataclass(slots=True, eq=False)
class Followed:
    """vLLM's records of a response: of its scheduler, and the tokens and log-probs of its output processor. vLLM
    ends it once it has `most` tokens, those of the prompt included."""

    request: Any
    name: str
    ends: frozenset[int]
    most: int
    tokens: list[int]
    log_probs: list[float] | None
    place: int = 0  # in its stretch
    begun: int = 0  # steps of the stretch that the records have as begun, and those whose tokens they have
    found: int = 0


class Stretch:
    """Steady steps of the same responses, of which some end meanwhile. Its own steps count from 0."""

    def __init__(self, responses: list[Followed], block: int, expected: int) -> None:
        """`expected` tokens of a step count as placeholders until they are found: 1 if steps are begun ahead."""
        self.responses = responses  # that run
        self.places = np.arange(len(responses))
        self.names = [response.name for response in responses]
        self.begun = self.found = 0
        self._expected = expected
        self._written = 0  # steps whose tokens are in the records of all
        self._tokens = np.empty((WAITING_STEPS, len(responses)), np.int64)
        self._log_probs = np.empty((WAITING_STEPS, len(responses)), np.float32)
        self._computed = np.array([response.request.num_computed_tokens for response in responses])
        self._prompts = np.array([response.request.num_prompt_tokens for response in responses])
        self._last = np.array([response.most for response in responses]) - 2 - self._computed
        self._by_phase: list[list[Followed]] = [[] for _ in range(block)]
        kinds: dict[frozenset[int], int] = {}  # of ends
        for place, response in enumerate(responses):
            response.place, response.begun, response.found = place, 0, 0
            self._by_phase[-int(self._computed[place]) % block].append(response)
        self._kinds = np.array([kinds.setdefault(response.ends, len(kinds)) for response in responses])
        self._tables = [_table(ends) for ends in kinds]

    def at_block(self, step: int) -> list[Followed]:
        """The running responses whose computed tokens fill whole blocks before that step."""
        return [response for response in self._by_phase[step % len(self._by_phase)] if runs(response)]

    def held(self, response: Followed, step: int) -> int:
        """The response's tokens before the one that the step finds, those of the prompt included."""
        return int(self._computed[response.place]) + step + 1

    def counts(self) -> tuple[list[int], list[int]]:
        """Of each running response, tokens that are computed and tokens sampled before the next step, if steps that are
        under way count as done."""
        computed = self._computed[self.places] + self.begun
        return computed.tolist(), (computed + 1 - self._prompts[self.places]).tolist()

    def placeholders(self) -> int:
        """Of a running response: tokens of steps that vLLM has begun and not returned."""
        response = self.responses[0]
        written: int = response.request.num_output_placeholders
        return written + self._expected * ((self.begun - response.begun) - (self.found - response.found))

    def narrow(self) -> None:
        """Leaves out the responses that no longer run."""
        kept = [runs(response) for response in self.responses]
        self.responses = [response for response, stays in zip(self.responses, kept, strict=True) if stays]
        self.places = self.places[np.array(kept, np.bool_)]
        self.names = [response.name for response in self.responses]

    def ended(self, places: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Which of the responses at `places` end with the token that the next step has found of each, in that order."""
        ended = self.found >= self._last[places]
        for kind, table in enumerate(self._tables):
            ended |= table[np.minimum(tokens, len(table) - 1)] & (self._kinds[places] == kind)
        return ended

    def add(self, places: np.ndarray, tokens: np.ndarray, log_probs: np.ndarray | None) -> None:
        """Ends a step, which has found a token of each response at `places`."""
        if self.found - self._written == WAITING_STEPS:
            self.write_all()
            self._written = self.found
        row = self.found - self._written
        self._tokens[row, places] = tokens
        if log_probs is not None:
            self._log_probs[row, places] = log_probs
        self.found += 1

    def write(self, response: Followed) -> None:
        """Puts what the steps so far began and found of the response into its records."""
        request, begun = response.request, self.begun - response.begun
        rows = slice(response.found - self._written, self.found - self._written)
        tokens = self._tokens[rows, response.place].tolist()
        ahead = begun - len(tokens)
        if tokens:
            request._output_token_ids.extend(tokens)
            request._all_token_ids.extend(tokens)
            response.tokens.extend(tokens)
            if response.log_probs is not None:
                response.log_probs.extend(self._log_probs[rows, response.place].tolist())
        request.num_computed_tokens += begun
        request.num_output_placeholders += self._expected * ahead
        request.num_in_flight_tokens += ahead
        response.begun, response.found = self.begun, max(self.found, response.found)

    def write_all(self) -> None:
        """The same for all responses that run."""
        for response in self.responses:
            if runs(response):
                self.write(response)

    def leave_to_vllm(self, response: Followed) -> None:
        """Writes its records, into which vLLM puts the token of the next step that is added."""
        self.write(response)
        response.found += 1


@lru_cache
def _table(ends: frozenset[int]) -> np.ndarray:
    """Whether a token, as an index, is one of `ends`; the last place stands for all larger ones."""
    table = np.zeros(max(ends, default=-1) + 2, np.bool_)
    table[list(ends)] = True
    return table


def one_token_each(sampled: Sequence[Sequence[int]]) -> np.ndarray:
    """The tokens of a step as an array. Raises ValueError if one has none or several."""
    tokens = np.fromiter(chain.from_iterable(sampled), np.int64)
    if len(tokens) != len(sampled) or not all(sampled):
        raise ValueError(f"vLLM sampled {len(tokens)} tokens of {len(sampled)} responses in a step of one token each")
    return tokens


def runs(response: Followed) -> bool:
    """Whether it is one of those that get tokens: it has not ended, was not aborted or taken back."""
    return response.request.status is RequestStatus.RUNNING
