"""The trainer with an actor rank that is killed once: `dying_rank.py UPDATES MARK ARGUMENTS` runs `trainer ARGUMENTS`.

Rank 1 of the actor kills itself in the backward pass of the first update after UPDATES, unless the file MARK exists,
which it makes first.
"""

import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.cli import main
from trainer.cluster.place import RankPlace
from trainer.config.tree import Config
from trainer.runs import workers

if TYPE_CHECKING:
    from trainer.roles.actor import ActorWorker


def make_actor(updates: int, mark: Path, config: Config, place: RankPlace) -> "ActorWorker":
    from torch import nn

    from trainer.roles.actor import ActorWorker
    from trainer.training.engine import TrainingEngine

    class Dying(ActorWorker):
        def build(self) -> TrainingEngine:
            engine = super().build()
            if place.rank == 1 and not mark.exists():
                engine.network.decoder.layers[-1].register_full_backward_pre_hook(self.die)
            return engine

        def die(self, *_: nn.Module) -> None:
            if self.engine.updates >= updates:
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    return Dying(config, place)


if __name__ == "__main__":
    workers.make_actor = partial(make_actor, int(sys.argv[1]), Path(sys.argv[2]))
    main(sys.argv[3:])
