"""Exported models are complete: Transformers loads them with the same weights, in one file or several."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.trainer.models.tiny_families import FAMILIES, write_tiny_model
from trainer.errors import DataError
from trainer.models.export import write_language_model
from trainer.models.small import ModelShape, build_tokenizer, create_model, save_model


@pytest.mark.parametrize("file_bytes", [5 * 10**9, 10**5])
def test_large_weights_are_several_files_with_an_index(tmp_path: Path, file_bytes: int) -> None:
    tokenizer = build_tokenizer(["How many are 1 + 2? #### 3"])
    source, directory = tmp_path / "source", tmp_path / "exported"
    save_model(create_model(tokenizer, ModelShape(), seed=0), tokenizer, source)
    generation = {"temperature": 0.7, "top_p": 0.8}  # Transformers reads this, but would refuse to write it
    (source / "generation_config.json").write_text(json.dumps(generation))
    weights = AutoModelForCausalLM.from_pretrained(source).state_dict()
    write_language_model(source, weights.items(), torch.bfloat16, directory, file_bytes)
    files = sorted(directory.glob("*.safetensors"))
    assert (len(files) > 1) == (file_bytes == 10**5) == (directory / "model.safetensors.index.json").is_file()
    loaded = AutoModelForCausalLM.from_pretrained(directory)
    assert loaded.dtype == torch.bfloat16
    assert all(torch.equal(loaded.state_dict()[name], weight.bfloat16()) for name, weight in weights.items())
    assert json.loads((directory / "generation_config.json").read_text()) == generation
    assert AutoTokenizer.from_pretrained(directory).chat_template == tokenizer.chat_template


def in_files(directory: Path) -> dict[str, Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def tiny_source(family: str, directory: Path) -> Path:
    build_tokenizer(["1 + 2"]).save_pretrained(directory)
    return write_tiny_model(family, directory)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_ranks_together_write_what_transformers_writes(family: str, ranks: int, tmp_path: Path) -> None:
    source, directory = tiny_source(family, tmp_path / "source"), tmp_path / "exported"
    model = AutoModelForCausalLM.from_pretrained(source)
    for rank in range(ranks):
        state = model.state_dict().items()
        write_language_model(source, state, torch.bfloat16, directory, file_bytes=20_000, rank=rank, ranks=ranks)
    expected, written = in_files(source), in_files(directory)
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(written[name].to(tensor.dtype), tensor), name
    loaded = AutoModelForCausalLM.from_pretrained(directory).state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in model.state_dict().items())
    configs = [json.loads((place / "config.json").read_text()) for place in (source, directory)]
    assert configs[0] == configs[1]


def test_a_missing_weight_is_named(tmp_path: Path) -> None:
    source = tiny_source("mixtral", tmp_path / "source")
    state = AutoModelForCausalLM.from_pretrained(source).state_dict()
    del state["model.norm.weight"]
    with pytest.raises(DataError, match=r"the weight model.norm.weight is missing"):
        write_language_model(source, state.items(), torch.bfloat16, tmp_path / "exported")
