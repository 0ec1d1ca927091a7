"""What is asked of a rollout engine and what it gives back, in our own words."""

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Request:
    """One response to one prompt. Temperature 0 is greedy decoding; `seed` matters above it only."""

    prompt: tuple[int, ...]
    temperature: float
    seed: int = 0


@dataclass(frozen=True)
class Response:
    """The tokens sampled, the end token included if it was reached, with the log-prob of each after the temperature.

    `log_probs` is None where the engine was told to leave them out.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...] | None


def request_seed(seed: int, step: int, prompt: int, sample: int) -> int:
    """The seed of one response, from nothing but its place in the run: a resumed run samples what it would have."""
    digest = hashlib.blake2b(f"{seed}/{step}/{prompt}/{sample}".encode(), digest_size=7).digest()
    return int.from_bytes(digest)
