"""How full an engine is while it samples: sequences that it decodes at once, their tokens, its cache."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Self

from trainer.rollout.sampling import Response, SamplingRequest

INTERVAL = 0.05  # seconds between two looks at an engine


@dataclass(frozen=True)
class Load:
    """What an engine decodes at a moment: sequences, the tokens of their prompts and responses so far, and the share of
    its cache of keys and values that is in use; None if the engine does not know."""

    running: int
    tokens: int
    cache: float | None = None


@dataclass(frozen=True)
class Drafts:
    """Tokens that an engine drafted and verified (`rollout.speculative_tokens`), and those of them that it accepted."""

    drafted: int = 0
    accepted: int = 0

    def __add__(self, other: "Drafts") -> "Drafts":
        return Drafts(self.drafted + other.drafted, self.accepted + other.accepted)


@dataclass(frozen=True)
class Occupancy:
    """Sums over an engine's looks at itself while it sampled, and over prompts: their tokens where the engine has a
    prefix cache, and those that it found there. And its drafted tokens, and those that it accepted."""

    looks: int = 0
    running: int = 0
    tokens: int = 0
    cache: float = 0.0
    cache_looks: int = 0
    cacheable_tokens: int = 0
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @classmethod
    def of(
        cls, loads: Sequence[Load], requests: Sequence[SamplingRequest] = (), responses: Sequence[Response] = ()
    ) -> Self:
        known = [load.cache for load in loads if load.cache is not None]
        running, tokens = sum(load.running for load in loads), sum(load.tokens for load in loads)
        prompts = [
            (len(request.prompt), response.cached_tokens)
            for request, response in zip(requests, responses, strict=True)
            if response.cached_tokens is not None
        ]
        cacheable, cached = (sum(own) for own in zip(*prompts, strict=True)) if prompts else (0, 0)
        return cls(len(loads), running, tokens, sum(known), len(known), cacheable, cached)

    def __add__(self, other: "Occupancy") -> "Occupancy":
        return Occupancy(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    def metrics(self, max_num_seqs: int) -> dict[str, float]:
        """Means over the time in which engines sampled; empty if that was too short for a look."""
        found = {}
        if self.looks:
            found["engines/running"] = self.running / self.looks
            found["engines/running_share"] = self.running / self.looks / max_num_seqs
            found["engines/tokens_in_flight"] = self.tokens / self.looks
        if self.cache_looks:
            found["engines/cache_usage"] = self.cache / self.cache_looks
        if self.cacheable_tokens:
            found["engines/prefix_hits"] = self.cached_tokens / self.cacheable_tokens
        if self.drafted_tokens:
            found["engines/accepted_share"] = self.accepted_tokens / self.drafted_tokens
        return found


@contextmanager
def looking(load: Callable[[], Load | None]) -> Iterator[list[Load]]:
    """Asks a thread to look at an engine while it samples; the list grows. The first look comes after an interval."""
    found: list[Load] = []
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(INTERVAL):
            if (now := load()) is not None and now.running:
                found.append(now)

    thread = threading.Thread(target=look, name="occupancy", daemon=True)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()
