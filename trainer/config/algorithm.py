"""Settings of the algorithm: advantages, the KL penalty, corrections, dynamic sampling."""

from functools import partial
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from trainer.algorithms.kl import KlEstimator
from trainer.algorithms.registry import CORRECTIONS, ESTIMATORS
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
    kl_target: float = Field(0.1, gt=0, description="adaptive: target KL per token")
    kl_horizon: int = Field(
        10_000,
        gt=0,
        description="adaptive: responses over which the coefficient adjusts; a larger horizon adapts more slowly",
    )
    correction: CorrectionName = Field(
        "none", description="importance weights for the gap between engine and trainer: trainer/algorithms/corrections/"
    )
    dynamic_sampling: bool = Field(
        False, description="sample until the batch is full of prompts whose responses differ in score (DAPO)"
    )
    max_sampling_rounds: int = Field(
        10, gt=0, description="maximum batches sampled for a step; other prompts then fill the rest"
    )

    @property
    def estimator(self) -> Estimator:
        """The row that `advantage` names."""
        return ESTIMATORS[self.advantage]
