"""The reward role: scores by rules, the user's function or a server, and by a reward model.

It imports torch for a reward model only.
"""

import os
from collections.abc import Sequence

from trainer.cluster.place import RankPlace
from trainer.config.sections.reward import RewardConfig
from trainer.config.tree import Config
from trainer.rewards.answer import Answer, Scored
from trainer.rewards.function import needs_process, reward_function
from trainer.rewards.processes.pool import RewardPool
from trainer.rewards.scores import as_scored, weighted_sums
from trainer.rewards.server import RewardServer


def own_processes(settings: RewardConfig, place: RankPlace) -> int:
    """A worker's share of its node's reward processes, at least one."""
    on_node = settings.processes or os.cpu_count() or 1
    first, end = (on_node * rank // place.local_size for rank in (place.local_rank, place.local_rank + 1))
    return max(1, end - first)


class RewardWorker:
    def __init__(self, config: Config, place: RankPlace) -> None:
        self._settings = settings = config.reward
        self._pool = RewardPool(settings, own_processes(settings, place))
        if settings.custom_function.given:
            self._pool.start()
        self._server = RewardServer(settings) if settings.server.url is not None else None
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
        """Scores by the server, or by rule or function: here, or in processes of their own if they may hang."""
        if self._server is not None:
            return self._server.score(answers)
        apart = [needs_process(self._settings, answer) for answer in answers]
        pooled = iter(self._pool.score([answer for answer, away in zip(answers, apart, strict=True) if away]))
        here = reward_function(self._settings) if not self._settings.custom_function.given else None
        return [
            next(pooled) if away or here is None else as_scored(here(answer), answer)
            for answer, away in zip(answers, apart, strict=True)
        ]
