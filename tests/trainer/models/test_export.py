"""Exported models are complete: Transformers loads them with the same weights, in one file or several."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.models.export import write_language_model
from trainer.models.small import ModelShape, build_tokenizer, create_model, save_model


@pytest.mark.parametrize("shard_size", ["5GB", "100KB"])
def test_large_weights_are_several_files_with_an_index(tmp_path: Path, shard_size: str) -> None:
    tokenizer = build_tokenizer(["How many are 1 + 2? #### 3"])
    source, directory = tmp_path / "source", tmp_path / "exported"
    save_model(create_model(tokenizer, ModelShape(), seed=0), tokenizer, source)
    generation = {"temperature": 0.7, "top_p": 0.8}  # Transformers reads this, but would refuse to write it
    (source / "generation_config.json").write_text(json.dumps(generation))
    weights = AutoModelForCausalLM.from_pretrained(source).state_dict()
    write_language_model(source, weights.items(), torch.bfloat16, directory, shard_size)
    files = sorted(directory.glob("*.safetensors"))
    assert (len(files) > 1) == (shard_size == "100KB") == (directory / "model.safetensors.index.json").is_file()
    loaded = AutoModelForCausalLM.from_pretrained(directory)
    assert loaded.dtype == torch.bfloat16
    assert all(torch.equal(loaded.state_dict()[name], weight.bfloat16()) for name, weight in weights.items())
    assert json.loads((directory / "generation_config.json").read_text()) == generation
    assert AutoTokenizer.from_pretrained(directory).chat_template == tokenizer.chat_template
