"""Settings of the algorithm: advantages, the KL penalty, corrections, dynamic sampling."""

import math
from functools import partial
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, field_validator, model_validator

from trainer.algorithms.losses.kl import KlEstimator
from trainer.algorithms.off_policy.rejection import Bound, Criterion
from trainer.algorithms.off_policy.treatment import OffPolicyCorrection
from trainer.algorithms.registry import CORRECTIONS, ESTIMATORS
from trainer.algorithms.resampling import Resampling
from trainer.algorithms.rows import Estimator
from trainer.config.section import Section, with_parameters

if TYPE_CHECKING:
    EstimatorName = str
    CorrectionName = str
else:
    EstimatorName = Literal[tuple(ESTIMATORS)]
    CorrectionName = Literal["none", *CORRECTIONS]


@partial(with_parameters, tables=(ESTIMATORS, CORRECTIONS))
class AlgorithmConfig(Section):
    advantage: EstimatorName = Field(
        "gae", description="advantage estimator: trainer/algorithms/advantages/; only gae needs a critic"
    )
    kl_coefficient: float = Field(
        0.01, ge=0, description="weight of the KL to the reference that is subtracted from the reward"
    )
    kl_estimator: KlEstimator = Field("k1", description="estimator of the KL in the reward")
    kl_control: Literal["fixed", "adaptive"] = Field(
        "fixed", description="adaptive: adjust the coefficient so that the KL approaches kl_target"
    )
    kl_target: float = Field(0.1, gt=0, description="adaptive: target of the mean over responses of their KL per token")
    kl_horizon: int = Field(
        10_000,
        gt=0,
        description="adaptive: responses over which the coefficient adjusts; a larger horizon adapts more slowly",
    )
    correction: CorrectionName = Field(
        "none", description="importance weights for the gap between engine and trainer: trainer/algorithms/corrections/"
    )
    correction_normalize: bool = Field(
        False,
        description="divide the weights of the correction by their mean over the step, or over a micro-batch "
        "with old_log_probs=engine",
    )
    rejection: dict[Criterion, Bound] = Field(
        {},
        description="tokens and responses that do not train, by criterion and bound: "
        "trainer/algorithms/off_policy/rejection.py. "
        "k1 takes the smallest and largest ratio trainer / engine, like {seq_mean_k1: [0.999, 1.001]}, or one bound "
        "for both; k2 and k3 take their largest value; token_veto takes the smallest ratio of any token",
    )
    old_log_probs: Literal["trainer", "engine"] = Field(
        "trainer",
        description="denominator of the ratio in the loss. trainer: the policy before the update, in its own pass; "
        "engine: the engine that sampled, where correction and rejection follow the policy during the update",
    )
    mask_truncated: bool = Field(
        False, description="responses that reach data.max_response_length without an end do not train"
    )
    dynamic_sampling: bool = Field(
        False, description="sample until the batch is full of prompts whose responses differ in score (DAPO)"
    )
    resampling: Resampling = Field(
        "none",
        description="draw the responses that train from those of the step, with replacement, by score (PF-PPO). power: "
        "in proportion to |score|^resampling_power; max_min: the highest and lowest scores; max_random: the highest "
        "four times as often as others",
    )
    resampling_power: float = Field(2.0, gt=0, description="power: exponent of the score")
    max_sampling_rounds: int | None = Field(
        10,
        gt=0,
        description="maximum batches sampled for a step; other prompts then fill the rest; null: no limit",
    )

    @field_validator("rejection")
    @classmethod
    def _bounds_fit_the_criteria(cls, given: dict[Criterion, Bound]) -> dict[Criterion, Bound]:
        for criterion, bound in given.items():
            numbers = bound if isinstance(bound, tuple) else (bound,)
            if isinstance(bound, tuple) and not criterion.endswith("k1"):
                raise ValueError(f"{criterion} takes one bound, not {list(bound)}")
            if not all(number > 0 for number in numbers) or bound == math.inf or numbers[0] > numbers[-1]:
                raise ValueError(f"{criterion}: bounds are above 0, and the lower one comes first")
        return given

    @model_validator(mode="after")
    def _power_is_read(self) -> Self:
        if self.resampling != "power" and self.resampling_power != 2.0:
            raise ValueError(
                f"resampling_power={self.resampling_power} has no effect with resampling={self.resampling}"
            )
        return self

    @model_validator(mode="after")
    def _components_are_named(self) -> Self:
        values = self.model_dump(include={"reward_components", "component_weights"})
        names, weights = values["reward_components"], values["component_weights"]
        if self.estimator.needs_components and not names:
            raise ValueError(f"algorithm.advantage={self.advantage} needs algorithm.reward_components")
        if names and not self.estimator.needs_components:
            raise ValueError(f"algorithm.reward_components has no effect with algorithm.advantage={self.advantage}")
        if weights and len(weights) != len(names):
            raise ValueError(f"{len(weights)} algorithm.component_weights for {len(names)} algorithm.reward_components")
        return self

    @model_validator(mode="after")
    def _corrections_have_an_effect(self) -> Self:
        bounds = self.model_dump(include={"correction_low", "correction_high"})  # settings of rows, no attributes here
        if bounds["correction_low"] >= bounds["correction_high"]:
            raise ValueError("algorithm.correction_low is not below algorithm.correction_high")
        if self.correction_normalize and self.correction == "none":
            raise ValueError("algorithm.correction_normalize has nothing to normalize: set algorithm.correction")
        return self

    @model_validator(mode="after")
    def _an_adaptive_coefficient_starts_above_zero(self) -> Self:
        if self.kl_control == "adaptive" and self.kl_coefficient == 0:
            raise ValueError("algorithm.kl_control=adaptive needs an algorithm.kl_coefficient above 0 to start from")
        return self

    @property
    def off_policy(self) -> OffPolicyCorrection:
        """Weights and rejection for the gap between engine and trainer."""
        row = None if self.correction == "none" else CORRECTIONS[self.correction]
        parameters = row.values(self) if row else {}
        return OffPolicyCorrection(row, parameters, self.correction_normalize, self.rejection)

    @property
    def estimator(self) -> Estimator:
        """The row that `advantage` names."""
        return ESTIMATORS[self.advantage]
