"""The algorithm: advantages, the KL penalty, corrections, sampling."""

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
    advantage: EstimatorName = Field("gae", description="estimator of advantages; only gae needs a critic")
    kl_coefficient: float = Field(0.01, ge=0, description="weight of the KL to the reference, taken off the reward")
    kl_estimator: KlEstimator = Field("k1", description="estimate of the KL in the reward")
    kl_control: Literal["fixed", "adaptive"] = Field(
        "fixed", description="adaptive: the coefficient follows the measured KL towards kl_target"
    )
    kl_target: float = Field(0.1, gt=0, description="KL per token that adaptive control aims at")
    kl_horizon: int = Field(10_000, gt=0, description="responses over which adaptive control acts")
    correction: CorrectionName = Field(
        "none", description="weights against the gap between engine and trainer; see trainer/algorithms/corrections.py"
    )
    dynamic_sampling: bool = Field(
        False, description="draw prompts until a batch is full of those whose responses differ in score (DAPO)"
    )
    max_sampling_rounds: int = Field(
        10, gt=0, description="batches drawn at most for one step; what is then missing is filled with other prompts"
    )

    @property
    def estimator(self) -> Estimator:
        """The row that `advantage` names."""
        return ESTIMATORS[self.advantage]
