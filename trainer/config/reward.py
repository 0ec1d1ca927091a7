"""The settings of a reward model."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from trainer.config.section import Section


class RewardModelConfig(Section):
    """A sequence classifier with one label, whole on each device of `device_mapping.reward`."""

    path: Path | None = Field(None, description="its directory; null: there is no reward model")
    weight: float = Field(1.0, description="of its score in the reward, beside reward.weight")
    dtype: Literal["float32", "bfloat16"] | None = Field(
        None, description="type of its weights and activations; model.dtype when not given"
    )
    input: Literal["tokens", "text"] | None = Field(
        None,
        description="what it reads: the policy's tokens as they are, or the messages through its own chat template; "
        "when not given, tokens if it has the policy's vocabulary",
    )
    max_length: int | None = Field(
        None, gt=0, description="tokens; of more than that, the last ones count. As many as it has positions for"
    )
    micro_batch_size: int = Field(16, gt=0, description="texts per forward pass")
