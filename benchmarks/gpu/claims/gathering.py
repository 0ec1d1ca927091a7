"""Functions that make the baseline's workers, without torch; see `benchmarks.gpu.weights.timed_factories`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.gpu.claims.gathering_workers import GatheringActor, LoadingRollout
    from trainer.cluster.place import RankPlace, Team
    from trainer.config.tree import Config


def make_gathering_actor(config: Config, place: RankPlace) -> GatheringActor:
    from benchmarks.gpu.claims.gathering_workers import GatheringActor

    return GatheringActor(config, place)


def make_loading_rollout(config: Config, place: RankPlace, team: Team) -> LoadingRollout:
    from benchmarks.gpu.claims.gathering_workers import LoadingRollout

    return LoadingRollout(config, place, team)
