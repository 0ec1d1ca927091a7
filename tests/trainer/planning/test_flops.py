"""Operations of a pass, against small cases that are counted by hand, pair by pair and product by product."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.planning.sizes import SIZES, write_sizes
from trainer.data.batches.batch import Batch
from trainer.planning.chips import dense_bf16_flops
from trainer.planning.flops import Rows, explains_parameters, forward_flops, seen, update_flops
from trainer.planning.model_size import ModelSize

# One layer: queries and output are 4 x 4, keys and values 4 x 2, the MLP has three products of 4 x 8.
SIZE = ModelSize(
    parameters=0, layers=1, hidden=4, intermediate=8, query=4, key_value=2, key_value_heads=1, vocabulary=10
)
WEIGHTS = 4 * 4 + 4 * 4 + 2 * (4 * 2) + 3 * (4 * 8)


def rows_of(*pairs: tuple[list[int], list[int]], share: bool = True, mini_batch_size: int | None = None) -> Rows:
    """What a pass computes of these prompts and responses."""
    prompts, responses = zip(*pairs, strict=True)
    batch = Batch.from_responses(prompts, responses, None)
    return Rows.of(batch.shared_prompts(), int(batch.response_mask.sum()), share, mini_batch_size)


def test_a_forward_pass_is_products_of_all_tokens_causal_attention_and_the_head_of_response_tokens() -> None:
    rows = rows_of(([1, 2], [3]), ([4, 5], [6, 7]))
    products = 2 * WEIGHTS * (3 + 4)
    pairs = (1 + 2 + 3) + (1 + 2 + 3 + 4)
    attention = (2 + 2) * 4 * pairs  # a score and a value of four channels: a product and a sum for each
    head = 2 * 4 * 10 * (1 + 2)
    assert forward_flops(SIZE, rows) == products + attention + head
    assert update_flops(SIZE, rows) == 3 * (products + attention + head)
    assert forward_flops(replace(SIZE, layers=2), rows) == 2 * (products + attention) + head


def test_a_shared_prompt_counts_once_per_mini_batch_and_every_time_without_sharing() -> None:
    group = [([1, 2], [3]), ([1, 2], [4]), ([1, 2], [5]), ([1, 2], [6])]
    prompt = 2 * WEIGHTS * 2 + 16 * (1 + 2)
    alone = forward_flops(SIZE, rows_of(*group, share=False))
    assert forward_flops(SIZE, rows_of(*group)) == alone - 3 * prompt
    assert forward_flops(SIZE, rows_of(*group, mini_batch_size=2)) == alone - 2 * prompt


def test_frozen_weights_need_no_gradient_but_attention_does() -> None:
    rows = rows_of(([1, 2], [3]))
    attention = 16 * (1 + 2 + 3)
    rest = forward_flops(SIZE, rows) - attention
    assert update_flops(SIZE, rows, frozen=True) == 2 * rest + 3 * attention


@given(st.lists(st.integers(0, 40), max_size=5), st.none() | st.integers(1, 12))
def test_pairs_are_those_of_a_mask(lengths: list[int], window: int | None) -> None:
    def counted(length: int) -> int:
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        return int((mask if window is None else mask.triu(1 - window)).sum())

    assert seen(lengths, window) == sum(map(counted, lengths))


@pytest.mark.parametrize("name", SIZES)
def test_published_models_are_explained_by_their_sizes(name: str, tmp_path: Path) -> None:
    size = ModelSize.read(write_sizes(name, tmp_path / name))
    assert size is not None
    assert explains_parameters(size)
    assert not explains_parameters(replace(size, parameters=8 * size.parameters))  # like a mixture of experts


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (0, 0)),
        ({"sliding_window": 4096}, (24, 4096)),
        ({"sliding_window": 4096, "use_sliding_window": False}, (0, 0)),
        ({"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"] * 12}, (12, 512)),
    ],
)
def test_layers_with_a_window_are_read_from_the_configuration(
    changes: dict[str, object], expected: tuple[int, int], tmp_path: Path
) -> None:
    model = write_sizes("0.5B", tmp_path / "model")
    written = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(written | changes))
    size = ModelSize.read(model)
    assert size is not None
    assert (size.windowed_layers, size.window) == expected
    rows = Rows([1000], 0)
    plain = forward_flops(replace(size, windowed_layers=0, window=0), rows)
    narrow = 0 < expected[1] < 1000
    assert (forward_flops(size, rows) < plain) == narrow


def test_a_chip_is_known_by_its_name() -> None:
    assert dense_bf16_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert dense_bf16_flops("NVIDIA H100 PCIe") == 756e12
    assert dense_bf16_flops("Intel Xeon, AVX512, 8 threads") is None
