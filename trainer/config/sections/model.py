"""Settings of the model to train."""

from pathlib import Path
from typing import Literal

from pydantic import Field, JsonValue

from trainer.config.section import ModelPath, Section
from trainer.errors import ConfigError

Dtype = Literal["float32", "bfloat16", "float16"]


class ModelConfig(Section):
    path: ModelPath | None = Field(
        None, description="directory or Hugging Face name of a causal language model with its tokenizer"
    )
    dtype: Dtype | None = Field(
        None,
        description="type of activations and of the engines' weights; bfloat16 on GPUs and float32 on CPU if not "
        "given. actor.weights_dtype is that of trained weights. float16 enables loss scaling",
    )
    override_config: dict[str, JsonValue] = Field(
        {},
        description="entries that replace those of the model's config.json in training, sampling and export, like "
        "{max_position_embeddings: 32768}",
    )
    pad_token: str | None = Field(None, description="padding token, for a tokenizer that defines none")

    def dtype_on(self, device: str) -> Dtype:
        """The type of activations and engine weights on a device, `cpu` or `cuda`."""
        return self.dtype or ("float32" if device == "cpu" else "bfloat16")

    @property
    def directory(self) -> Path:
        """`path`, which must be set. Raises ConfigError if it is not."""
        if self.path is None:
            raise ConfigError("model.path is not set", hint="set model.path=DIRECTORY of a model with its tokenizer")
        return self.path
