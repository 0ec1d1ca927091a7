"""The reward role: scores by a rule or the user's function, a reward model, or both; imports torch for a model only."""

import os
from collections.abc import Sequence

from trainer.cluster.place import RankPlace
from trainer.config.tree import Config
from trainer.rewards.answer import Answer, Scored
from trainer.rewards.function import as_score, needs_processes, reward_function, weighted_sums
from trainer.rewards.pool import RewardPool


class RewardWorker:
    def __init__(self, config: Config, place: RankPlace) -> None:
        self._settings = settings = config.reward
        self._pool: RewardPool | None = None
        if needs_processes(settings):
            self._pool = RewardPool(settings, settings.processes or os.cpu_count() or 1)
        else:
            self._reward = reward_function(settings)
        self._model = None
        if settings.model.path is not None:
            import torch

            from trainer.rewards.model import RewardModel

            self._model = RewardModel(config, torch.device(place.device))

    def score(self, answers: Sequence[Answer]) -> list[Scored]:
        """The reward of each answer, in order. Raises RewardError if a score is not a finite number."""
        ruled = self._ruled(answers)
        return ruled if self._model is None else weighted_sums(ruled, self._model.score(answers), self._settings)

    def _ruled(self, answers: Sequence[Answer]) -> list[Scored]:
        if self._pool is not None:
            return self._pool.score(answers)
        return [Scored(as_score(self._reward(answer), answer)) for answer in answers]
