"""Settings of Kahneman-Tversky optimisation."""

from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from trainer.algorithms.registry import UNPAIRED_LOSSES
from trainer.algorithms.rows import Labelled
from trainer.config.offline import OfflineConfig
from trainer.config.section import Section

if TYPE_CHECKING:
    from torch import Tensor

    UnpairedLossName = str
else:
    UnpairedLossName = Literal[tuple(UNPAIRED_LOSSES)]


class KtoSettings(Section):
    loss: UnpairedLossName = Field("kto", description="loss of a response: trainer/algorithms/unpaired_losses/")
    beta: float = Field(0.1, gt=0, description="how strongly the policy is held to the reference")
    desirable_weight: float = Field(1.0, ge=0, description="weight of the losses of desirable responses")
    undesirable_weight: float = Field(1.0, ge=0, description="weight of the losses of undesirable responses")

    def losses(self, responses: Labelled) -> "Tensor":
        """The weighted loss of each response, [rows]."""
        import torch  # only runs need it

        weights = torch.where(responses.desirable, self.desirable_weight, self.undesirable_weight)
        return weights * UNPAIRED_LOSSES[self.loss].loss(responses, self.beta)


class KtoConfig(OfflineConfig):
    """Settings of a KTO run: `data.train_batch_size` counts responses; of `actor.*` what concerns optimizer, memory."""

    method = "KTO"
    command = "kto"
    kto: KtoSettings = KtoSettings()

    @model_validator(mode="after")
    def _prompts_can_be_mismatched(self) -> Self:
        if UNPAIRED_LOSSES[self.kto.loss].needs_kl and self.data.train_batch_size < 2:
            raise ValueError(
                f"kto.loss={self.kto.loss} pairs each prompt with the response to another one: "
                "set data.train_batch_size to 2 or more"
            )
        return self
