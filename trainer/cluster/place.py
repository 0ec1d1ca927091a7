"""A worker's rank and device."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RankPlace:
    """The rank of a worker in its role, its node's address, and its device: cpu or cuda.

    It is worker `local_rank` of the `local_size` workers of its role on its node.
    """

    rank: int
    world_size: int
    address: str
    device: str
    local_rank: int = 0
    local_size: int = 1


@dataclass(frozen=True)
class Team:
    """A worker's place among workers of one node that start, fail and restart together, like the ranks of an engine.

    `meeting` is the name of a file in the node's temporary directory through which they find each other; every start
    has another.
    """

    rank: int = 0
    size: int = 1
    meeting: str = ""
