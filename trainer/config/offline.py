"""Settings of runs that learn from files of responses."""

from collections.abc import Mapping
from typing import Any, ClassVar

from trainer.config.data import DataConfig
from trainer.config.roles import ActorConfig
from trainer.config.tree import Config, RunConfig


class OfflineConfig(RunConfig):
    """The settings that these runs share. `data.train_batch_size` counts rows of the files."""

    responses_per_example: ClassVar[int] = 1
    # What the run decides of `actor` and `algorithm`. The loss sums over each response's tokens.
    fixed_actor: ClassVar[Mapping[str, Any]] = {
        "ppo_epochs": 1,
        "policy_loss": "ppo",
        "loss_aggregation": "seq-mean-token-sum",
        "kl_loss_coefficient": 0.0,
        "entropy_coefficient": 0.0,
    }
    fixed_algorithm: ClassVar[Mapping[str, Any]] = {"advantage": "reinforce_plus_plus"}
    data: DataConfig = DataConfig()
    actor: ActorConfig = ActorConfig()

    def for_workers(self) -> Config:
        """Settings of actor and reference: one optimizer step per batch."""
        rows = self.responses_per_example * self.data.train_batch_size
        return Config.model_validate(
            {
                "model": self.model,
                "trainer": self.trainer,
                "data": self.data,
                "actor": self.actor.model_copy(update={**self.fixed_actor, "mini_batch_size": rows}),
                "algorithm": self.fixed_algorithm,
                "rollout": {"samples_per_prompt": self.responses_per_example},
            }
        )
