"""Settings of the validation on held-out prompts."""

from pydantic import Field

from trainer.algorithms.truncation import Truncation
from trainer.config.section import Section


class ValidationConfig(Section):
    samples: int = Field(1, gt=0, description="responses to each held-out prompt")
    temperature: float = Field(0.0, ge=0, description="sampling temperature; 0: greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="sample only the likeliest tokens that hold this probability")
    top_k: int | None = Field(None, gt=0, description="sample only the k likeliest tokens; null: all")
    min_p: float = Field(
        0.0, ge=0, le=1, description="sample only tokens with at least this share of the likeliest one's probability"
    )

    @property
    def truncation(self) -> Truncation:
        """Which tokens may be sampled."""
        return Truncation(self.top_p, self.top_k, self.min_p)
