"""Settings of direct preference optimisation."""

from functools import partial
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from trainer.algorithms.registry import PREFERENCE_LOSSES
from trainer.algorithms.rows import Pairs
from trainer.config.offline import OfflineConfig
from trainer.config.section import Section, with_parameters
from trainer.config.sections.optimization import check_read

if TYPE_CHECKING:
    from torch import Tensor

    PreferenceLossName = str
else:
    PreferenceLossName = Literal[tuple(PREFERENCE_LOSSES)]


@partial(with_parameters, tables=(PREFERENCE_LOSSES,))
class DpoSettings(Section):
    loss: PreferenceLossName = Field(
        "sigmoid", description="loss of a pair: trainer/algorithms/preference_losses/; sigmoid is DPO's own"
    )
    beta: float = Field(0.1, gt=0, description="how strongly the policy is held to the reference")

    @model_validator(mode="after")
    def _every_setting_is_read(self) -> Self:
        check_read(self, "loss", PREFERENCE_LOSSES)
        return self

    def losses(self, pairs: Pairs) -> "Tensor":
        """The loss of each pair, [pairs]."""
        row = PREFERENCE_LOSSES[self.loss]
        return row.loss(pairs, self.beta, **row.values(self))


class DpoConfig(OfflineConfig):
    """Settings of a DPO run: `data.train_batch_size` counts pairs; of `actor.*` what concerns optimizer and memory."""

    method = "DPO"
    command = "dpo"
    responses_per_example = 2
    dpo: DpoSettings = DpoSettings()
