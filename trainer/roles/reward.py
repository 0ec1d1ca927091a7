"""The rule that scores responses. Needs no torch, so it costs next to nothing."""

import os
from collections.abc import Sequence

from trainer.config import Config
from trainer.reward_pool import RewardPool
from trainer.rewards import Answer, Scored, as_score, needs_processes, reward_function
from trainer.roles.place import Place


class RewardWorker:
    def __init__(self, config: Config, _place: Place) -> None:
        settings = config.reward
        self._pool: RewardPool | None = None
        if needs_processes(settings):
            self._pool = RewardPool(settings, settings.processes or os.cpu_count() or 1)
        else:
            self._reward = reward_function(settings)

    def score(self, answers: Sequence[Answer]) -> list[Scored]:
        """The reward of each answer, in their order. Raises RewardError for one that is no finite number."""
        if self._pool is not None:
            return self._pool.score(answers)
        return [Scored(as_score(self._reward(answer), answer)) for answer in answers]
