"""Requests to a rollout engine and its responses."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from trainer.algorithms.truncation import WHOLE, Truncation
from trainer.data.batches.routes import Choices, Segment


@dataclass(frozen=True)
class SamplingRequest:
    """A request for one response, with log-probs or without. Temperature 0 decodes greedily and ignores `seed`.

    `max_tokens` None means `data.max_response_length`. The last `begun` tokens of the prompt belong to the response: a
    stop text may begin in them. From the token `record_from` of the prompt on, the engine records the experts that
    tokens choose; None: of no token.
    """

    prompt: tuple[int, ...]
    temperature: float
    seed: int = 0
    max_tokens: int | None = None
    truncation: Truncation = WHOLE
    log_probs: bool = True
    begun: int = 0
    record_from: int | None = None


@dataclass(frozen=True)
class Response:
    """The sampled tokens, including the end token if there is one, and their log-probs in the distribution that was
    sampled from: after the temperature, and renormalised after a truncation.

    `log_probs` is None if none were requested. `ended` means that the last token is an end token or completes a
    stop string. `cached_tokens` of the prompt were in the engine's prefix cache; None if it has none. `routes` are the
    experts that tokens chose, counted from the start of the prompt, at whose end a segment ends; tokens that the engine
    did not compute for this response are in none, and nor is the last token.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...] | None
    ended: bool = True
    cached_tokens: int | None = field(default=None, compare=False, kw_only=True)
    routes: Sequence[Segment] = field(default=(), compare=False, kw_only=True)


@dataclass(frozen=True)
class Part(Response):
    """The next tokens of a response that an engine samples in flight. `finished` means that no more follow, because it
    has ended or has all its tokens."""

    finished: bool = field(default=False, kw_only=True)


def segments_of(request: SamplingRequest, first: int, choices: Choices) -> list[Segment]:
    """The experts of consecutive tokens from `first` on, as far as they were to be recorded: those of the prompt, then
    those of the response."""
    if request.record_from is None:
        return []
    begin, bound = max(first, request.record_from), len(request.prompt)
    parts = [
        (begin, choices[begin - first : max(0, bound - first)]),
        (max(begin, bound), choices[max(begin, bound) - first :]),
    ]
    return [Segment(start, part) for start, part in parts if len(part)]


def request_seed(seed: int, step: int, prompt: int, sample: int) -> int:
    """The seed of one response. It depends only on the response's position in the run, so a resumed run samples the
    same responses as an uninterrupted one."""
    digest = hashlib.blake2b(f"{seed}/{step}/{prompt}/{sample}".encode(), digest_size=7).digest()
    return int.from_bytes(digest)


def retry_seed(seed: int) -> int:
    """The seed of the next attempt at a response whose last one had this seed. It follows from the response's position
    in the run and the number of attempts."""
    return int.from_bytes(hashlib.blake2b(f"retry {seed}".encode(), digest_size=7).digest())
