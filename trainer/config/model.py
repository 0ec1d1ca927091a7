"""Settings of the model to train."""

from pathlib import Path
from typing import Literal

from pydantic import Field, JsonValue

from trainer.config.section import ModelPath, Section
from trainer.errors import ConfigError


class ModelConfig(Section):
    path: ModelPath | None = Field(
        None, description="directory or Hugging Face name of a causal language model with its tokenizer"
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32",
        description="type of activations and of the engines' weights; trained weights stay float32. "
        "float16 enables loss scaling",
    )

    override_config: dict[str, JsonValue] = Field(
        {},
        description="entries that replace those of the model's config.json in training, sampling and export, like "
        "{max_position_embeddings: 32768}",
    )
    pad_token: str | None = Field(None, description="padding token, for a tokenizer that defines none")

    @property
    def directory(self) -> Path:
        """`path`, which must be set. Raises ConfigError if it is not."""
        if self.path is None:
            raise ConfigError("model.path is not set", hint="set model.path=DIRECTORY of a model with its tokenizer")
        return self.path
