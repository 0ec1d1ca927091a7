"""Exports the trained policy as a model directory for Transformers and vLLM."""

import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig

from trainer.models.pretrained import empty_language_model, read_tokenizer

_GENERATION = "generation_config.json"


def write_language_model(
    source: Path, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, directory: Path, shard_size: str = "5GB"
) -> None:
    """Writes `weights` with the configuration, the generation defaults and the tokenizer of the model at `source`.

    `weights` include the buffers that belong to the model's files; these keep their type. Weights above `shard_size` in
    total are several safetensors files with an index.
    """
    model = empty_language_model(source, dtype)
    buffers = dict(model.named_buffers())
    own = {name: tensor if name in buffers else tensor.to(dtype) for name, tensor in weights}
    model.load_state_dict(own, assign=True)
    model.tie_weights()  # a tied weight was gathered under each of its names and is written once
    model.generation_config = GenerationConfig.from_model_config(model.config)
    model.save_pretrained(directory, max_shard_size=shard_size)
    if (source / _GENERATION).is_file():  # copied: Transformers refuses to write some files that it reads
        shutil.copyfile(source / _GENERATION, directory / _GENERATION)
    read_tokenizer(source).save_pretrained(directory)
