"""How full an engine is while it samples: running sequences, their tokens, its KV cache."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Self

from trainer.rollout.sampling import Response, SamplingRequest

INTERVAL = 0.05  # seconds between two samples of an engine's load


@dataclass(frozen=True)
class Load:
    """An engine's load at a moment: running sequences, their tokens including prompts, and the share of its KV cache
    that is in use, None if unknown."""

    running: int
    tokens: int
    cache: float | None = None


@dataclass(frozen=True)
class Drafts:
    """Drafted tokens that an engine verified (`rollout.speculative_tokens`), and how many of them it accepted."""

    drafted: int = 0
    accepted: int = 0

    def __add__(self, other: "Drafts") -> "Drafts":
        return Drafts(self.drafted + other.drafted, self.accepted + other.accepted)


@dataclass(frozen=True)
class Occupancy:
    """Sums over samples of an engine's load. Also sums of the tokens of prompts if it has a prefix cache, of those that
    were cached, and of drafted and accepted tokens."""

    samples: int = 0
    running: int = 0
    tokens: int = 0
    cache: float = 0.0
    cache_samples: int = 0
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
        cacheable, cached = (sum(tokens) for tokens in zip(*prompts, strict=True)) if prompts else (0, 0)
        return cls(len(loads), running, tokens, sum(known), len(known), cacheable, cached)

    def __add__(self, other: "Occupancy") -> "Occupancy":
        return Occupancy(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def metrics(self, max_num_seqs: int) -> dict[str, float]:
        """Means over the time in which engines sampled; empty without any sample."""
        metrics = {}
        if self.samples:
            metrics["engines/running"] = self.running / self.samples
            metrics["engines/running_share"] = self.running / self.samples / max_num_seqs
            metrics["engines/tokens_in_flight"] = self.tokens / self.samples
        if self.cache_samples:
            metrics["engines/cache_usage"] = self.cache / self.cache_samples
        if self.cacheable_tokens:
            metrics["engines/prefix_hits"] = self.cached_tokens / self.cacheable_tokens
        if self.drafted_tokens:
            metrics["engines/accepted_share"] = self.accepted_tokens / self.drafted_tokens
        return metrics


def _interval(ended: threading.Event) -> bool:
    return ended.wait(INTERVAL)


@contextmanager
def sampling_load(
    load: Callable[[], Load | None], wait: Callable[[threading.Event], bool] = _interval
) -> Iterator[list[Load]]:
    """Samples an engine's load in a thread while the engine decodes; the list grows.

    `wait` waits for the time of the next sample, and returns True to end the thread: the event is set then.
    """
    loads: list[Load] = []
    ended = threading.Event()

    def collect() -> None:
        while not wait(ended):
            if (now := load()) is not None and now.running:
                loads.append(now)

    thread = threading.Thread(target=collect, name="occupancy", daemon=True)
    thread.start()
    try:
        yield loads
    finally:
        ended.set()
        thread.join()
