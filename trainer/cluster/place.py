"""A worker's rank and device."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RankPlace:
    """The rank of a worker in its role, its node's address, and its device: cpu or cuda."""

    rank: int
    world_size: int
    address: str
    device: str
