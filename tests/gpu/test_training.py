"""The training engine on a GPU, without adapters. The measurements are in layers.py and engines.py."""

import os
from collections.abc import Callable
from typing import Any

import pytest

from tests.gpu.ranks import Ranks

pytestmark = pytest.mark.timeout(180)

Measure = Callable[..., dict[str, Any]]
FAMILIES = ["Qwen2 and 2.5", "Qwen3", "Llama 3", "Mistral"]
BFLOAT16 = 0.03  # relative rounding error of products of a few dozen numbers


@pytest.mark.parametrize("share_prompts", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_float32_rows_match_single_rows(
    one_rank: Ranks, measure: Measure, family: str, share_prompts: bool
) -> None:
    """FlashAttention does not support float32, so GPUs use padded attention here too."""
    arguments = {"family": family, "dtype": "float32", "share_prompts": share_prompts}
    results = measure(one_rank, "tests.gpu.layers.packed_network", **arguments)
    assert results["log_probs"] < 1e-4
    assert results["gradient of a weight"] < 1e-3


@pytest.mark.parametrize("share_prompts", [False, True])
@pytest.mark.parametrize("family", ["Qwen2 and 2.5", "Mistral"])
def test_packed_bfloat16_rows_match_single_rows_up_to_rounding(
    one_rank: Ranks, measure: Measure, family: str, share_prompts: bool
) -> None:
    """Most rows are longer than Mistral's window."""
    arguments = {"family": family, "dtype": "bfloat16", "share_prompts": share_prompts}
    results = measure(one_rank, "tests.gpu.layers.packed_network", **arguments)
    assert results["log_probs, mean"] < 0.03
    assert results["gradient, cosine"] > 0.99


@pytest.mark.parametrize("window", [None, 1, 7, 64])
@pytest.mark.parametrize("width", [16, 64, 128])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_variable_length_attention_matches_padded_attention(
    one_rank: Ranks, measure: Measure, dtype: str, width: int, window: int | None
) -> None:
    results = measure(one_rank, "tests.gpu.layers.attention", dtype=dtype, window=window, width=width)
    hidden = results.pop("hidden by the window")
    assert hidden > 0.3 if window else hidden == 0
    if window == 1:  # a token sees only itself: its weight is 1 for any query and key
        del results["query"], results["key"]
    for name, distance in results.items():
        assert distance < BFLOAT16, name


@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize(
    "given", [{"width": 64, "sinks": True}, {"width": 192, "value_width": 128}], ids=["sinks", "latent attention"]
)
def test_attention_of_mixtures_matches_the_formula(
    one_rank: Ranks, measure: Measure, given: dict[str, Any], window: int | None
) -> None:
    results = measure(one_rank, "tests.gpu.layers.attention", dtype="bfloat16", window=window, **given)
    del results["hidden by the window"]
    for name, distance in results.items():
        assert distance < BFLOAT16, name


@pytest.mark.parametrize("seed", range(4))
def test_attention_of_long_packed_rows_matches_each_row_in_float32(
    one_rank: Ranks, measure: Measure, seed: int
) -> None:
    """No row may be wrong, so the worst counts: a mean over 16,384 tokens would hide one."""
    results = measure(one_rank, "tests.gpu.layers.attention_of_long_rows", dtype="bfloat16", seed=seed)
    for name, distance in results.items():
        assert distance < BFLOAT16, name


@pytest.mark.parametrize(
    ("dtype", "compiled", "checkpointed"),
    [
        ("float32", False, False),
        ("float32", False, True),
        ("float32", True, False),
        ("bfloat16", False, False),
        ("bfloat16", True, False),
        ("bfloat16", True, True),
    ],
)
def test_micro_batches_change_no_gradient(
    one_rank: Ranks, measure: Measure, dtype: str, compiled: bool, checkpointed: bool
) -> None:
    if compiled and os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        pytest.skip("TORCHDYNAMO_DISABLE=1, as in the CPU image, which has no compiler")
    execution = {"compile_layers": compiled, "checkpoint_activations": checkpointed}
    results = measure(one_rank, "tests.gpu.engines.micro_batches", dtype=dtype, **execution)
    assert bool(results["compiled frames"]) == compiled
    for tokens in ("all", 600, 250):
        if dtype == "float32":
            assert results[f"log_probs, {tokens} tokens"] < 1e-4
            assert results[f"gradient of a weight, {tokens} tokens"] < 1e-3
        else:
            assert results[f"log_probs, mean, {tokens} tokens"] < 0.03
            assert results[f"gradient, cosine, {tokens} tokens"] > 0.99


def test_float16_trains_and_survives_an_overflow(one_rank: Ranks, measure: Measure) -> None:
    results = measure(one_rank, "tests.gpu.engines.float16")
    assert results["log_probs, mean"] < 0.01
    assert results["gradient, cosine"] > 0.999
    losses = [step["loss"] for step in results["steps"] if not step["skipped"]]
    assert len(losses) >= 4  # the initial scale may be too large for a step or two
    assert losses == sorted(losses, reverse=True)
    assert results["overflow"]["skipped"] == 1
    assert results["overflow"]["loss_scale"] == 2.0**59
    assert results["after"]["skipped"] == 0
    assert results["after"]["loss"] < losses[0]


def test_offloaded_weights_and_moments_leave_the_gpu_between_turns(one_rank: Ranks, measure: Measure) -> None:
    plain, offloaded = (measure(one_rank, "tests.gpu.engines.trained", offloaded=value) for value in (False, True))
    assert offloaded["losses"] == pytest.approx(plain["losses"], rel=1e-3)
    assert offloaded["sums"] == pytest.approx(plain["sums"], rel=1e-3, abs=0.1)
    assert offloaded["log_probs"] == pytest.approx(plain["log_probs"], abs=0.05)
    leaves = 3 * plain["weight_bytes"]  # a weight and its two moments
    for kind in ("used", "taken"):
        assert offloaded[f"{kind} at work"] - offloaded[f"{kind} between turns"] > 0.9 * leaves
    assert plain["used between turns"] - offloaded["used between turns"] > 0.9 * leaves


def test_an_offloaded_reference_leaves_the_gpu_between_turns(one_rank: Ranks, measure: Measure) -> None:
    plain, offloaded = (measure(one_rank, "tests.gpu.engines.reference", offloaded=value) for value in (False, True))
    assert offloaded["log_probs"] == pytest.approx(plain["log_probs"], abs=1e-4)
    assert offloaded["again"] == pytest.approx(plain["log_probs"], abs=1e-4)
    assert plain["used between turns"] - offloaded["used between turns"] > 0.9 * plain["weight_bytes"]


@pytest.mark.gpus(2)
def test_matrices_split_over_two_gpus_change_no_gradient(two_ranks: Ranks, measure: Measure) -> None:
    results = measure(two_ranks, "tests.gpu.layers.backends", backend="fsdp", family="Qwen3", dtype="float32", split=2)
    assert results["log_probs"] < 1e-4
    assert results["gradient of a weight"] < 1e-3
