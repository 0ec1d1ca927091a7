"""Settings of the supervised warm start."""

from pathlib import Path

from pydantic import Field

from trainer.config.section import Section
from trainer.config.sections.optimization import OptimizerConfig, ScheduleConfig


class WarmStartScheduleConfig(ScheduleConfig):
    """Without any of these settings, the rate rises over the first tenth of the steps while a decay to 0 limits it."""


class WarmStartConfig(Section):
    """Settings of the warm start."""

    train_files: list[Path] = Field(
        default=[Path("data/demonstrations.parquet")], min_length=1, description="Parquet files with worked answers"
    )
    validation_files: list[Path] = Field(
        default=[Path("data/validation.parquet")], min_length=1, description="Parquet files with held-out questions"
    )
    output: Path = Field(default=Path("models/warm-start"), description="directory for the model and its tokenizer")
    seed: int = Field(default=0, description="seed of the initial weights and of the order of the answers")
    layers: int = Field(default=2, gt=0, description="transformer blocks")
    hidden_size: int = Field(default=128, gt=0, multiple_of=64, description="width; 32 per attention head")
    vocabulary_size: int = Field(
        default=512, gt=260, description="largest number of tokens: all bytes and the most frequent words"
    )
    learning_rate: float = Field(default=2e-3, gt=0, description="peak rate, after warm-up and before decay")
    weight_decay: float = Field(default=0.0, ge=0, description="weight decay of the optimizer")
    max_gradient_norm: float = Field(default=1.0, gt=0, description="gradients are clipped to this L2 norm")
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: WarmStartScheduleConfig = WarmStartScheduleConfig()
    batch_size: int = Field(default=64, gt=0, description="answers per optimizer step")
    steps: int = Field(default=200, gt=0, description="optimizer steps")
    test_freq: int = Field(default=20, gt=0, description="steps between validations")
    max_response_length: int = Field(default=16, gt=0, description="tokens per validation answer, at most")

    def rate_factor(self, step: int) -> float:
        """The factor on the learning rate at a step, counted from 0."""
        if self.schedule.model_fields_set:
            return self.schedule.factor(step, self.steps)
        # The last steps average the demonstrations.
        return min((step + 1) / max(1, self.steps // 10), (self.steps - step) / self.steps)
