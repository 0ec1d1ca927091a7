"""Ranks that read their own slices of a model's files have the weights that Transformers loads, in any layout."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.models.tiny_families import FAMILIES
from tests.trainer.training import loading_program
from tests.trainer.training.ranks import run_program

PROGRAM = Path(loading_program.__file__)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    directory = tmp_path_factory.mktemp("models")
    run_program(PROGRAM, directory)
    loaded = [torch.load(directory / f"loaded_{size}.pt", weights_only=False) for size in loading_program.LAYOUTS]
    return {**loaded[0], **loaded[1]}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", [name for layouts in loading_program.LAYOUTS.values() for name in layouts])
def test_every_weight_and_buffer_is_the_one_in_the_files(results: dict[Any, Any], layout: str, family: str) -> None:
    assert results[layout, family] == []


def test_experts_may_be_split_over_one_dimension_and_their_matrices_over_another(results: dict[Any, Any]) -> None:
    assert results["experts and shards"] == []


def test_weights_that_are_in_no_file_keep_their_values(results: dict[Any, Any]) -> None:
    assert results["critic"] == []
    assert torch.equal(results["head"], torch.full((1, 32), 0.5))
    assert results["adapters"] == []


def test_the_first_rank_broadcasts_what_it_alone_has_read(results: dict[Any, Any]) -> None:
    assert results["broadcast"] == []


def test_ranks_with_other_files_are_refused(results: dict[Any, Any]) -> None:
    first, second = results["other files"]
    assert first is None
    assert "rank 1 built a different network than rank 0; the first difference is language_model.model.norm" in second
