"""Supervised fine-tuning (SFT): learns to write the responses in files.

A step is a step of policy optimisation on every learned token with advantage 1, whose loss is the cross entropy.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import model_validator

from trainer.config.data import DataConfig
from trainer.config.roles import TrainedModelConfig
from trainer.config.sft import SftSettings
from trainer.config.tree import Config
from trainer.data.batch import Batch
from trainer.data.demonstrations import Demonstration, read_demonstrations
from trainer.data.subset import Subset
from trainer.records.console import Column
from trainer.runs.interfaces import ActorRole
from trainer.runs.loop import forward
from trainer.runs.offline import OfflineConfig, OfflineRun, train_offline

COLUMNS = (
    Column("sft/loss", "loss", ".4f"),
    Column("validation/sft_loss", "held-out loss", ".4f"),
    Column("time/step", "seconds", ".1f"),
)


class SftConfig(OfflineConfig):
    """Settings of fine-tuning: `data.train_batch_size` counts rows; of `actor.*` what concerns optimizer and memory."""

    fixed_actor: ClassVar[Mapping[str, Any]] = {
        **OfflineConfig.fixed_actor,
        "policy_loss": "gpg",
        "loss_aggregation": "token-mean",
    }
    fixed_algorithm: ClassVar[Mapping[str, Any]] = {**OfflineConfig.fixed_algorithm, "kl_coefficient": 0.0}
    sft: SftSettings = SftSettings()

    @model_validator(mode="after")
    def _every_setting_is_read(self) -> Self:
        read = {*TrainedModelConfig.model_fields, "learning_rate", "weight_decay", "max_gradient_norm"}
        for name in sorted(self.actor.model_fields_set - read):
            value = getattr(self.actor, name)
            if value != self.fixed_actor.get(name):
                instead = "set data.train_batch_size" if name == "mini_batch_size" else "leave it out"
                raise ValueError(f"actor.{name}={value} has no effect on fine-tuning: {instead}")
        if self.data.custom_cls.path is not None:
            raise ValueError("data.custom_cls has no effect on fine-tuning: write the rows into data.train_files")
        for name in ("max_prompt_length", "max_response_length"):
            if name in self.data.model_fields_set:
                raise ValueError(f"data.{name} has no effect on fine-tuning: set sft.max_length, which limits a row")
        return self

    def for_workers(self) -> Config:
        """Settings of the actor: one optimizer step per batch, on the mean over all learned tokens of the batch."""
        config = super().for_workers()
        limits = {"max_prompt_length": 1, "max_response_length": self.sft.max_length - 1}
        return config.model_copy(update={"data": self.data.model_copy(update=limits)})


def fine_tune(settings: SftConfig) -> Path:
    """Fine-tunes on the Ray cluster at RAY_ADDRESS or on this machine; the run's directory. Raises TrainerError."""

    def read(files: Sequence[Path], tokenizer: Any, data: DataConfig, subset: Subset) -> list[Demonstration]:
        return read_demonstrations(files, tokenizer, data, settings.sft, subset)

    return train_offline(settings, COLUMNS, read, SftRun)


class SftRun(OfflineRun[Demonstration]):
    """Takes steps on batches of demonstrations."""

    def learn(self, examples: Sequence[Demonstration]) -> tuple[Batch, dict[str, float]]:
        batch = demonstration_batch(examples)
        return batch.with_(advantages=batch.response_mask.float()), {}

    def step(self, step: int) -> dict[str, float]:
        metrics = super().step(step)
        return {"sft/loss": metrics["actor/policy_loss"], **metrics}

    def validate(self) -> dict[str, float]:
        return super().validate() if self.validation else {}

    def measure(self, examples: Sequence[Demonstration], count: int) -> dict[str, float]:
        """The mean loss over the learned tokens of held-out rows."""
        batch = demonstration_batch(examples)
        log_probs = forward(self.actor, ActorRole.log_probs, batch)
        mask = batch.response_mask[:count]
        return {"validation/sft_loss": -(log_probs[:count].where(mask, 0.0).sum() / mask.sum()).item()}


def demonstration_batch(examples: Sequence[Demonstration]) -> Batch:
    """One row per demonstration; the mask marks the tokens that are learned."""
    prompts, responses, masks = zip(*((one.prompt, one.response, one.learned) for one in examples), strict=True)
    return Batch.from_responses(prompts, responses, None, masks)
