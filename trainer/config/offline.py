"""Settings of runs that learn from files of responses."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from pydantic import model_validator

from trainer.config.sections.data import DataConfig
from trainer.config.sections.roles import ActorConfig, TrainedModelConfig
from trainer.config.sections.trainer import TrainerConfig
from trainer.config.tree import RunConfig, WorkersConfig


class OfflineWorkers(WorkersConfig):
    """The settings of an offline run's actor and reference, most of which follow from the user's.

    `row_tokens` are the limits of a row, `data` has others.
    """

    compares: bool
    rows_per_example: int
    row_tokens: tuple[int, int]

    @property
    def needs_critic(self) -> bool:
        return False

    @property
    def needs_reference(self) -> bool:
        return self.compares

    @property
    def responses_per_prompt(self) -> int:
        return self.rows_per_example

    @property
    def longest_row(self) -> tuple[int, int]:
        return self.row_tokens


class OfflineConfig(RunConfig):
    """The settings that these runs share. `data.train_batch_size` counts rows of the files."""

    method: ClassVar[str]  # as error messages call it
    responses_per_example: ClassVar[int] = 1
    # What the run decides of `actor` and `algorithm`. The loss sums over each response's tokens.
    fixed_actor: ClassVar[Mapping[str, Any]] = {
        "ppo_epochs": 1,
        "policy_loss": "ppo",
        "loss_aggregation": "seq-mean-token-sum",
        "kl_loss_coefficient": 0.0,
        "entropy_coefficient": 0.0,
    }
    # Settings of steps that sample.
    unread_trainer: ClassVar[Sequence[str]] = ("mode", "max_staleness", "critic_warmup", "stop_at", "trajectories")
    compares: ClassVar[bool] = True  # with a reference
    data: DataConfig = DataConfig()
    actor: ActorConfig = ActorConfig()

    @model_validator(mode="after")
    def _every_setting_is_read(self) -> Self:
        read = {*TrainedModelConfig.model_fields, "learning_rate", "weight_decay", "max_gradient_norm"}
        for name in sorted(self.actor.model_fields_set - read):
            value = getattr(self.actor, name)
            if value != self.fixed_actor.get(name):
                instead = "set data.train_batch_size" if name == "mini_batch_size" else "leave it out"
                raise ValueError(f"actor.{name}={value} has no effect on {self.method}: {instead}")
        for name in self.unread_trainer:
            value = getattr(self.trainer, name)
            if value != TrainerConfig.model_fields[name].default:
                raise ValueError(f"trainer.{name}={value} has no effect on {self.method}: leave it out")
        if self.actor.backend == "exact":
            raise ValueError(
                f"actor.backend=exact has no effect on {self.method}, in which no engine samples: leave it out"
            )
        if self.data.custom_cls.path is not None:
            raise ValueError(f"data.custom_cls has no effect on {self.method}: write the rows into data.train_files")
        return self

    @property
    def row_tokens(self) -> tuple[int, int]:
        """Most tokens of a row's prompt, and of its response."""
        return self.data.max_prompt_length, self.data.max_response_length

    @property
    def row_limit(self) -> str | None:
        """The settings that limit a row, if they are not data.max_prompt_length and data.max_response_length."""
        return None

    def for_workers(self) -> OfflineWorkers:
        """Settings of actor and reference: one optimizer step per batch."""
        rows = self.responses_per_example * self.data.train_batch_size
        return OfflineWorkers(
            model=self.model,
            trainer=self.trainer,
            data=self.data,
            actor=self.actor.model_copy(update={**self.fixed_actor, "mini_batch_size": rows}),
            compares=self.compares,
            rows_per_example=self.responses_per_example,
            row_tokens=self.row_tokens,
        )
