"""Where a worker is."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RankPlace:
    """One rank of every role; `address` is its node's, `device` is cpu or cuda."""

    rank: int
    world_size: int
    address: str
    device: str
