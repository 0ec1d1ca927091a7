"""Functions that make timed workers, in a module without torch.

A worker's process unpickles the function before it sees its GPUs only, and torch counts them when it is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.gpu.weights.split import TimedActor, TimedRollout
    from trainer.cluster.place import RankPlace, Team
    from trainer.config.tree import Config


def make_timed_actor(config: Config, place: RankPlace) -> TimedActor:
    from benchmarks.gpu.weights.split import TimedActor

    return TimedActor(config, place)


def make_timed_rollout(config: Config, place: RankPlace, team: Team) -> TimedRollout:
    from benchmarks.gpu.weights.split import TimedRollout

    return TimedRollout(config, place, team)
