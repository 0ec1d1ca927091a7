"""The trainer with an actor rank that sends itself a signal, once:

    signalled_rank.py SIGNAL RANK UPDATES MARK ARGUMENTS

runs `trainer ARGUMENTS`. The signal is sent in the backward pass of the first update after UPDATES, unless the file
MARK exists, which the rank makes first, with the number of updates before this one. If UPDATES is `saved`, it is the
first update that finds a checkpoint; those before it give the disk time.
"""

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.cli import main
from trainer.cluster.place import RankPlace
from trainer.config.tree import Config
from trainer.runs import workers
from trainer.runs.checkpoints.checkpoint import checkpoints

if TYPE_CHECKING:
    from trainer.roles.actor import ActorWorker


def make_actor(
    number: signal.Signals, rank: int, updates: str, mark: Path, config: Config, place: RankPlace
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
            saved = checkpoints(config.trainer.output_dir / str(config.trainer.run_id))
            if saved if updates == "saved" else self.engine.updates >= int(updates):
                mark.write_text(str(self.engine.updates))
                os.kill(os.getpid(), number)
            elif updates == "saved":
                time.sleep(0.5)  # more than a step takes, so that the disk keeps up

    return Signalled(config, place)


if __name__ == "__main__":
    name, rank, updates, mark, *arguments = sys.argv[1:]
    workers.make_actor = partial(make_actor, signal.Signals[name], int(rank), updates, Path(mark))
    main(arguments)
