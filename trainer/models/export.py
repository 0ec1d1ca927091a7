"""Exports the trained policy as a model directory for Transformers and vLLM."""

import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig

from trainer.models.pretrained import empty_language_model, read_tokenizer
from trainer.records.files.disk import writing

# Copied as they are: Transformers refuses to write some generation defaults that it reads, and the processors of models
# with images are not loaded.
_COPIED = (
    "generation_config.json",
    *("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json", "chat_template.json"),
)


def write_language_model(
    source: Path, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, directory: Path, shard_size: str = "5GB"
) -> None:
    """Writes `weights` with the configuration, generation defaults, tokenizer and processors of the model at `source`.

    `weights` include the buffers that belong to the model's files; these keep their type. Weights above `shard_size` in
    total are several safetensors files with an index. Raises CheckpointError if the disk refuses them.
    """
    model = empty_language_model(source, dtype)
    buffers = dict(model.named_buffers())
    state = {name: tensor if name in buffers else tensor.to(dtype) for name, tensor in weights}
    model.load_state_dict(state, assign=True)
    model.tie_weights()  # a tied weight was gathered under each of its names and is written once
    model.generation_config = GenerationConfig.from_model_config(model.config)
    with writing(directory, sum(weight.nbytes for weight in model.parameters())):
        model.save_pretrained(directory, max_shard_size=shard_size)
        for name in _COPIED:
            if (source / name).is_file():
                shutil.copyfile(source / name, directory / name)
        read_tokenizer(source).save_pretrained(directory)
