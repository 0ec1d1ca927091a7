"""Megatron-Core's layers on GPUs compared with Transformers'."""

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

from tests.gpu.ranks import Ranks

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"),
]

Measure = Callable[..., dict[str, Any]]


def assert_near_to_transformers(results: dict[str, float], dtype: str) -> None:
    if dtype == "float32":
        assert results["log_probs"] < 1e-4
        assert results["gradient of a weight"] < 1e-3
        return
    # Both round in different places; neither may be much further from float32 than the other.
    assert results["log_probs, mean"] < 1.5 * results["Transformers' log_probs, mean"]
    assert results["gradient"] < 1.5 * results["Transformers' gradient"]
    assert results["gradient, cosine"] > 0.99


@pytest.mark.parametrize("family", ["Qwen2 and 2.5", "Qwen3", "Llama 3", "Mistral"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_probs_and_gradients_match_transformers_layers(
    one_rank: Ranks, measure: Measure, family: str, dtype: str
) -> None:
    assert_near_to_transformers(
        measure(one_rank, "tests.gpu.layers.backends", backend="megatron", family=family, dtype=dtype), dtype
    )


@pytest.mark.gpus(2)
@pytest.mark.parametrize("family", ["Qwen2 and 2.5", "Qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_split_over_two_gpus_match_too(two_ranks: Ranks, measure: Measure, family: str, dtype: str) -> None:
    assert_near_to_transformers(
        measure(two_ranks, "tests.gpu.layers.backends", backend="megatron", family=family, dtype=dtype, split=2), dtype
    )
