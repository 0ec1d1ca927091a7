"""Settings of on-policy distillation."""

from typing import Literal, Self

from pydantic import Field, model_validator

from trainer.algorithms.losses.kl import KlEstimator
from trainer.config.section import ModelPath, Section


class DistillationConfig(Section):
    """The policy learns from a teacher's log-probs of its own samples."""

    teacher: ModelPath | None = Field(
        None,
        description="directory or Hugging Face name of the teacher, which has the policy's vocabulary; null: none. It "
        "takes all other settings from the reference",
    )
    estimator: KlEstimator = Field(
        "k1",
        description="estimator of the KL to the teacher; only k1 suits signal=advantage, and any other signal=loss",
    )
    signal: Literal["advantage", "loss"] = Field(
        "advantage",
        description="advantage: minus the KL is the advantage of each token in a clipped policy loss; loss: the KL is "
        "the loss, with the estimator's own gradient",
    )
    limit: float | None = Field(None, gt=0, description="KL of a token is clamped to [-limit, limit]; null: not at all")
    coefficient: float = Field(1.0, gt=0, description="weight of the loss from the teacher")
    rewards: bool = Field(False, description="learn from rewards as well")
    clip_ratio: float = Field(0.2, gt=0, description="signal=advantage: ratios are clipped to 1 - and 1 + this")
    clip_dual: float = Field(
        3.0, gt=1, description="signal=advantage: largest ratio for tokens with a negative advantage"
    )

    @model_validator(mode="after")
    def _the_gradient_depends_on_the_teacher(self) -> Self:
        if self.signal == "loss" and self.estimator == "k1":
            raise ValueError("signal=loss: the gradient of k1 does not depend on the teacher: set estimator=k2 or k3")
        return self

    @property
    def replaces_rewards(self) -> bool:
        """Whether the policy learns from the teacher alone."""
        return self.teacher is not None and not self.rewards
