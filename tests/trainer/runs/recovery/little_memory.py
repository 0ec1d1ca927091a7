"""The trainer with a mock of a small GPU: `little_memory.py TOKENS UPDATES ARGUMENTS` runs `trainer ARGUMENTS`.

Rank 0 of the actor is out of memory in every update after the first UPDATES, inside the last layer of a micro-batch
with more than TOKENS tokens.
"""

import sys
from functools import partial
from typing import TYPE_CHECKING

from trainer.cli import main
from trainer.cluster.place import RankPlace
from trainer.config.tree import Config
from trainer.runs import workers

if TYPE_CHECKING:
    from trainer.roles.actor import ActorWorker


def make_actor(tokens: int, updates: int, config: Config, place: RankPlace) -> "ActorWorker":
    import torch
    from torch import nn

    from trainer.roles.actor import ActorWorker
    from trainer.training.engine import TrainingEngine

    class SmallGpu(ActorWorker):
        def build(self) -> TrainingEngine:
            engine = super().build()
            if place.rank == 0:
                engine.network.decoder.layers[-1].register_forward_pre_hook(self.fail)
            return engine

        def fail(self, _: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            updating = torch.is_grad_enabled() and self.engine.updates >= updates
            if updating and inputs[0].shape[1] > tokens:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB. Of the allocated memory, …")

    return SmallGpu(config, place)


if __name__ == "__main__":
    workers.make_actor = partial(make_actor, int(sys.argv[1]), int(sys.argv[2]))
    main(sys.argv[3:])
