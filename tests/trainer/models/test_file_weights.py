"""Weights that stay in their files equal those that Transformers reads, whole and in slices."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.trainer.models.tiny_families import FAMILIES, write_tiny_model
from trainer.models.file_weights import FileWeight
from trainer.models.pretrained import load_language_model, why_not_in_files

TYPES = (torch.float32, torch.bfloat16, torch.float16)


def parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters(remove_duplicate=False))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_in_its_files_equals_the_one_in_memory(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    directory = write_tiny_model(family, tmp_path)
    in_memory, in_files = (load_language_model(directory, dtype, in_files=where) for where in (False, True))
    expected, loaded = parameters(in_memory), parameters(in_files)
    assert loaded.keys() == expected.keys()
    assert all(isinstance(weight, FileWeight) for weight in loaded.values())
    for name, weight in expected.items():
        assert loaded[name].dtype == weight.dtype
        assert torch.equal(loaded[name].whole(), weight), name
    assert len({*map(id, loaded.values())}) == len({*map(id, expected.values())})  # what is tied
    buffers = dict(in_files.named_buffers())
    for name, buffer in in_memory.named_buffers():
        assert torch.equal(buffers[name], buffer), name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_in_its_files_computes(family: str, tmp_path: Path) -> None:
    directory, ids = write_tiny_model(family, tmp_path), torch.arange(20).view(2, 10)
    logits = [
        load_language_model(directory, in_files=where)(input_ids=ids, use_cache=False).logits for where in (False, True)
    ]
    assert torch.equal(*logits)


def in_files() -> tuple[FileWeight, Tensor]:
    """Three experts, each with a matrix of four and one of two rows, merged as Transformers merges them."""
    first, second = torch.randn(3, 4, 6), torch.randn(3, 2, 6)
    merged = [torch.stack([FileWeight([expert]) for expert in part], dim=0) for part in (first, second)]
    joined = torch.cat(merged, dim=1).to(torch.bfloat16)
    assert isinstance(joined, FileWeight)
    return joined, torch.cat([first, second], dim=1).bfloat16()


@given(st.data())
def test_any_slice_of_merged_weights_is_read(data: st.DataObject) -> None:
    weight, expected = in_files()
    bounds = [sorted((data.draw(st.integers(0, size)), data.draw(st.integers(0, size)))) for size in weight.shape]
    target = torch.empty([last - first for first, last in bounds], dtype=torch.bfloat16)
    weight.read_into(target, [first for first, _ in bounds])
    assert torch.equal(target, expected[tuple(slice(*bound) for bound in bounds)])


def test_numbers_that_were_rounded_twice_are_so_in_a_slice() -> None:
    numbers = torch.randn(100)
    weight = FileWeight([numbers]).to(torch.bfloat16).to(torch.float32)
    assert torch.equal(torch.empty(100).copy_(weight), numbers.bfloat16().float())


def test_a_weight_in_a_file_cannot_be_changed() -> None:
    weight, _ = in_files()
    with pytest.raises(TypeError, match="would change a weight that is in its file"):
        weight.zero_()


def test_quantised_weights_are_read_whole(tmp_path: Path) -> None:
    directory = write_tiny_model("llama", tmp_path)
    assert why_not_in_files(directory) is None
    settings = json.loads((directory / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "mxfp4"}
    (directory / "config.json").write_text(json.dumps(settings))
    assert why_not_in_files(directory) == "its weights are quantised"
