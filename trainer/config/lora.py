"""Training small adapters beside frozen weights."""

from pydantic import Field

from trainer.config.section import Section

ALL_LINEAR = "all-linear"


class LoraConfig(Section):
    rank: int = Field(
        0,
        ge=0,
        le=512,
        description="rank of the adapters, as far as vLLM goes; 0: no adapters, all weights are trained",
    )
    alpha: float = Field(16.0, gt=0, description="what adapters add is multiplied by alpha / rank")
    target_modules: list[str] = Field(
        [ALL_LINEAR], min_length=1, description="names of the layers with an adapter, as q_proj; all-linear: every one"
    )
