"""The trainer with an actor rank that sends itself a signal, once:

    signalled_rank.py SIGNAL RANK UPDATES MARK ARGUMENTS

runs `trainer ARGUMENTS`. The signal is sent in the backward pass of the first update after UPDATES, unless the file
MARK exists, which the rank makes first.
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


def make_actor(
    number: signal.Signals, rank: int, updates: int, mark: Path, config: Config, place: RankPlace
) -> "ActorWorker":
    from torch import nn

    from trainer.roles.actor import ActorWorker
    from trainer.training.engine import TrainingEngine

    class Signalled(ActorWorker):
        def build(self) -> TrainingEngine:
            engine = super().build()
            if place.rank == rank and not mark.exists():
                engine.network.decoder.layers[-1].register_full_backward_pre_hook(self.send)
            return engine

        def send(self, *_: nn.Module) -> None:
            if self.engine.updates >= updates:
                mark.touch()
                os.kill(os.getpid(), number)

    return Signalled(config, place)


if __name__ == "__main__":
    name, rank, updates, mark, *arguments = sys.argv[1:]
    workers.make_actor = partial(make_actor, signal.Signals[name], int(rank), int(updates), Path(mark))
    main(arguments)
