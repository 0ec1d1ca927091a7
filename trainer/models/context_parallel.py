"""Context parallelism: several ranks compute the same rows, each a part of every row's tokens."""

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class ContextGroup:
    """The ranks that compute the same rows."""

    group: dist.ProcessGroup

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        return int(dist.get_rank(self.group))

    @property
    def size(self) -> int:
        """How many ranks compute the same rows."""
        return int(dist.get_world_size(self.group))
