"""Exports the trained policy as a model directory for Transformers and vLLM."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig


def write_language_model(source: Path, weights: list[tuple[str, Tensor]], dtype: torch.dtype, directory: Path) -> None:
    """Writes `weights` with the configuration and the tokenizer of the model at `source`."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=dtype)
    model.load_state_dict({name: tensor.to(dtype) for name, tensor in weights}, assign=True)
    model.tie_weights()  # a tied weight was gathered under each of its names and is written once
    model.generation_config = GenerationConfig.from_model_config(model.config)
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(source).save_pretrained(directory)
