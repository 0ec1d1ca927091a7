"""The rule that scores responses. Needs no torch, so it costs next to nothing."""

from collections.abc import Sequence

from trainer.config import Config
from trainer.rewards import reward_function
from trainer.roles.place import Place


class RewardWorker:
    def __init__(self, config: Config, _place: Place) -> None:
        self._reward = reward_function(config.reward.name)

    def score(self, answers: Sequence[tuple[str, str]]) -> list[float]:
        """The reward of each (response, ground truth)."""
        return [self._reward(response, ground_truth) for response, ground_truth in answers]
