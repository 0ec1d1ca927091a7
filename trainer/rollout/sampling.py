"""What is asked of a rollout engine and what it gives back, in our own words."""

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Request:
    """One response to one prompt. Temperature 0 is greedy decoding; `seed` matters above it only.

    `max_tokens` is None for as many as `data.max_response_length` allows.
    """

    prompt: tuple[int, ...]
    temperature: float
    seed: int = 0
    max_tokens: int | None = None


@dataclass(frozen=True)
class Response:
    """The tokens sampled, the end token included if it was reached, with the log-prob of each after the temperature.

    `log_probs` is None where the engine was told to leave them out. `ended` says that the last one is an end token.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...] | None
    ended: bool = True


def request_seed(seed: int, step: int, prompt: int, sample: int) -> int:
    """The seed of one response, from nothing but its place in the run: a resumed run samples what it would have."""
    digest = hashlib.blake2b(f"{seed}/{step}/{prompt}/{sample}".encode(), digest_size=7).digest()
    return int.from_bytes(digest)
