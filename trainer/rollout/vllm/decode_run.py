"""Consecutive decode-only steps of one batch, and their tokens that are not yet in vLLM's request records.

Writing a token to vLLM's records takes Python a microsecond, and a step of a thousand responses a millisecond or more.
So tokens wait in arrays and are flushed several at a time: when a response fills a KV block, when it ends, and before
vLLM schedules.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
from vllm.v1.request import RequestStatus

PENDING_STEPS = 256  # steps whose tokens may wait to be flushed


@dataclass(slots=True, eq=False)
class Tracked:
    """A response of a vLLM scheduler: vLLM's `request`, and the lists of tokens and log-probs in its output processor.

    vLLM ends it at `max_length` tokens, prompt included, or at a token of `stops`. `index` is its place in the run;
    `scheduled` and `sampled` count the steps of the run that vLLM's records include.
    """

    request: Any
    request_id: str
    stops: frozenset[int]
    max_length: int
    tokens: list[int]
    log_probs: list[float] | None
    index: int = 0
    scheduled: int = 0
    sampled: int = 0


class DecodeRun:
    """A run of decode-only steps. Responses may end during the run, none may join. Its steps count from 0."""

    def __init__(self, responses: list[Tracked], block_size: int, placeholders: int) -> None:
        """`placeholders` is 1 if vLLM counts a scheduled token as an output placeholder until it is sampled."""
        self.responses = responses  # those that run
        self.indices = np.arange(len(responses))
        self.request_ids = [response.request_id for response in responses]
        self.scheduled = self.sampled = 0  # steps
        self._placeholders = placeholders
        self._flushed = 0  # steps whose tokens are in the records of all responses
        self._tokens = np.empty((PENDING_STEPS, len(responses)), np.int64)
        self._log_probs = np.empty((PENDING_STEPS, len(responses)), np.float32)
        self._computed = np.array([response.request.num_computed_tokens for response in responses])
        self._prompts = np.array([response.request.num_prompt_tokens for response in responses])
        self._last_steps = np.array([response.max_length for response in responses]) - 2 - self._computed
        self._by_phase: list[list[Tracked]] = [[] for _ in range(block_size)]
        stop_sets: dict[frozenset[int], int] = {}
        for index, response in enumerate(responses):
            response.index, response.scheduled, response.sampled = index, 0, 0
            self._by_phase[-int(self._computed[index]) % block_size].append(response)
        self._stop_set_of = np.array([stop_sets.setdefault(response.stops, len(stop_sets)) for response in responses])
        self._is_stop = [_lookup(stops) for stops in stop_sets]

    def at_block_boundary(self, step: int) -> list[Tracked]:
        """The running responses whose computed tokens fill whole KV blocks before that step."""
        return [response for response in self._by_phase[step % len(self._by_phase)] if runs(response)]

    def length_before(self, response: Tracked, step: int) -> int:
        """Tokens of the response, prompt included, before the token that the step samples."""
        return int(self._computed[response.index]) + step + 1

    def counts(self) -> tuple[list[int], list[int]]:
        """For each running response, the computed and the output tokens before the next step to schedule."""
        computed = self._computed[self.indices] + self.scheduled
        return computed.tolist(), (computed + 1 - self._prompts[self.indices]).tolist()

    def placeholders(self) -> int:
        """Scheduled tokens of each running response that are not sampled yet."""
        first = self.responses[0]
        recorded: int = first.request.num_output_placeholders
        ahead = (self.scheduled - first.scheduled) - (self.sampled - first.sampled)
        return recorded + self._placeholders * ahead

    def drop_ended(self) -> None:
        """Leaves out the responses that no longer run."""
        is_running = [runs(response) for response in self.responses]
        self.responses = [response for response, stays in zip(self.responses, is_running, strict=True) if stays]
        self.indices = self.indices[np.array(is_running, np.bool_)]
        self.request_ids = [response.request_id for response in self.responses]

    def ended(self, indices: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Whether the responses at `indices` end with the `tokens` that the next step samples, in that order."""
        ended = self.sampled >= self._last_steps[indices]
        for number, lookup in enumerate(self._is_stop):
            ended |= lookup[np.minimum(tokens, len(lookup) - 1)] & (self._stop_set_of[indices] == number)
        return ended

    def append(self, indices: np.ndarray, tokens: np.ndarray, log_probs: np.ndarray | None) -> None:
        """Adds the sampled tokens of a step, one for each response at `indices`."""
        if self.sampled - self._flushed == PENDING_STEPS:
            self.flush_all()
            self._flushed = self.sampled
        row = self.sampled - self._flushed
        self._tokens[row, indices] = tokens
        if log_probs is not None:
            self._log_probs[row, indices] = log_probs
        self.sampled += 1

    def flush(self, response: Tracked) -> None:
        """Writes the response's pending tokens and counts to vLLM's records."""
        request, scheduled = response.request, self.scheduled - response.scheduled
        rows = slice(response.sampled - self._flushed, self.sampled - self._flushed)
        tokens = self._tokens[rows, response.index].tolist()
        ahead = scheduled - len(tokens)
        if tokens:
            request._output_token_ids.extend(tokens)
            request._all_token_ids.extend(tokens)
            response.tokens.extend(tokens)
            if response.log_probs is not None:
                response.log_probs.extend(self._log_probs[rows, response.index].tolist())
        request.num_computed_tokens += scheduled
        request.num_output_placeholders += self._placeholders * ahead
        request.num_in_flight_tokens += ahead
        response.scheduled, response.sampled = self.scheduled, max(self.sampled, response.sampled)

    def flush_all(self) -> None:
        """Flushes all running responses."""
        for response in self.responses:
            if runs(response):
                self.flush(response)

    def hand_over(self, response: Tracked) -> None:
        """Flushes the response and leaves the token of the next step to vLLM."""
        self.flush(response)
        response.sampled += 1


def runs(response: Tracked) -> bool:
    """Whether the response has not ended, and was neither aborted nor preempted."""
    return response.request.status is RequestStatus.RUNNING


@lru_cache
def _lookup(stops: frozenset[int]) -> np.ndarray:
    """Whether a token, as an index, is one of `stops`; the last place stands for all larger tokens."""
    lookup = np.zeros(max(stops, default=-1) + 2, np.bool_)
    lookup[list(stops)] = True
    return lookup


def one_token_each(sampled: Sequence[Sequence[int]]) -> np.ndarray:
    """The tokens of a decode-only step as an array. Raises ValueError if a response has none or several."""
    tokens = np.fromiter(chain.from_iterable(sampled), np.int64)
    if len(tokens) != len(sampled) or not all(sampled):
        raise ValueError(f"vLLM sampled {len(tokens)} tokens for {len(sampled)} responses in a decode-only step")
    return tokens
