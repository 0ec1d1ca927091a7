"""Both rollout engines compared with the trainer: they sample from its policy before and after an update."""

import inspect
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from tests.trainer.rollout.conftest import results_of
from tests.trainer.training.ranks import environment
from trainer.algorithms.off_policy.agreement import log_prob_agreement
from trainer.algorithms.truncation import Truncation, truncated
from trainer.config.tree import Config
from trainer.errors import ConfigError, WorkerError
from trainer.rollout.sampling import request_seed
from trainer.rollout.vllm.settings import engine_environment, weight_settings
from trainer.weights.arrival import check_in_place, checked
from trainer.weights.buckets import DEVICE_IN_HANDLE, checksum, pack, store, word_sum

PROGRAM = Path(__file__).with_name("engine_program.py")


# engine, rank of the adapters, processes that it spans, what it does with adapters
ENGINES = {
    "vllm": ("vllm", 0, 1, "adapters"),
    "vllm over two processes": ("vllm", 0, 2, "adapters"),
    "vllm with adapters over two processes": ("vllm", 4, 2, "adapters"),
    "vllm with merged adapters": ("vllm", 4, 1, "merged"),
    "transformers": ("transformers", 0, 1, "adapters"),
    "transformers with adapters": ("transformers", 4, 1, "adapters"),
    "transformers with merged adapters": ("transformers", 4, 1, "merged"),
}


@pytest.fixture(scope="module", params=ENGINES)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return results_of(PROGRAM, tmp_path_factory.mktemp("engine"), *ENGINES[request.param])


def test_log_probs_equal_the_trainer_s_after_a_sync(results: dict[str, Any]) -> None:
    assert results["after the first sync"] < 1e-4
    assert results["after the second sync"] < 1e-4


def test_log_probs_differ_before_a_sync(results: dict[str, Any]) -> None:
    """Guards the test above, which would pass without a sync if the weights were equal."""
    assert results.get("before any sync", 1.0) > 0.1  # with adapters, engines start with the frozen weights
    assert results["trained, not synced"] > 0.1


def test_only_adapters_are_sent(results: dict[str, Any]) -> None:
    """Two layers, each with four adapted matrices, less the one that is excluded; each with A and B."""
    if "before any sync" in results:
        pytest.skip("all weights are trained")
    assert len(results["sent"]) == (2 * 4 - 1) * 2
    assert all(name.endswith(("lora_A.weight", "lora_B.weight")) for name in results["sent"])


def test_responses_do_not_depend_on_other_requests(results: dict[str, Any]) -> None:
    assert results["responses again"] == results["responses"]
    assert results["responses of a few"] == results["responses"][10:14]


def test_another_step_samples_other_responses(results: dict[str, Any]) -> None:
    pairs = zip(results["responses"], results["responses of the next step"], strict=True)
    assert sum(first == second for first, second in pairs) < 10


def test_responses_end_with_an_end_token_or_at_the_limit(results: dict[str, Any]) -> None:
    asked_for, models_own, limit = 7, 1, 16
    assert any(response[-1] == asked_for for response in results["responses"])
    for response in results["responses"]:
        assert not {asked_for, models_own} & set(response[:-1])
        assert response[-1] in (asked_for, models_own) or len(response) == limit


def test_a_request_can_lower_the_token_limit(results: dict[str, Any]) -> None:
    ends = {7, 1}
    for (tokens, ended), whole in zip(results["three tokens"], results["responses"], strict=True):
        assert tokens == whole[:3]
        assert ended == (tokens[-1] in ends)


def test_responses_without_log_probs_have_the_same_tokens(results: dict[str, Any]) -> None:
    assert results["without log-probs"] == [[token_ids, None] for token_ids in results["responses"]]


def test_greedy_decoding_ignores_the_seed(results: dict[str, Any]) -> None:
    assert results["greedy"] == results["greedy again"]
    assert results["no requests"] == []


@pytest.mark.parametrize("truncation", ["top_p", "top_k", "min_p", "all of them"])
def test_truncated_responses_have_renormalised_log_probs(results: dict[str, Any], truncation: str) -> None:
    """A token outside the allowed ones would differ infinitely."""
    if "truncated" not in results:
        pytest.skip("looked at without adapters only")
    assert results["truncated"][truncation]["difference"] < 1e-4
    assert results["truncated"][truncation]["below"] < -0.1  # the log-probs of the whole distribution are others


def test_stop_strings_end_a_response_and_stay_in_it(results: dict[str, Any]) -> None:
    if "stopped" not in results:
        pytest.skip("looked at without adapters only")
    cut = results["cut at the stop strings"]
    assert results["stopped"] == cut
    assert sum(len(tokens) < len(whole) for (tokens, _), whole in zip(cut, results["uncut"], strict=True)) > 5


def test_vllm_loads_the_exported_model(results: dict[str, Any]) -> None:
    if "first tokens of the export" not in results:
        pytest.skip("looked at with vLLM only")
    assert results["first tokens of the export"] == results["first tokens of the trainer"]


def test_vllm_reserves_memory_for_adapted_layers_only(model: Path) -> None:
    sections = {"model": {"path": model, "dtype": "float32"}, "actor": {"lora": {"rank": 20}}}
    sections["rollout"] = {"lora": "adapters"}
    settings = weight_settings(Config.model_validate(sections), "cpu")
    assert settings["max_lora_rank"] == 32
    assert settings["lora_target_modules"] == sorted(
        f"{layer}_proj" for layer in ("q", "k", "v", "o", "gate", "up", "down")
    )
    with pytest.raises(ConfigError, match=r"model\.dtype=float32: on GPUs vLLM computes adapters in bfloat16"):
        weight_settings(Config.model_validate(sections), "cuda")


def test_an_engine_that_ignores_its_adapters_is_noticed() -> None:
    a, b = torch.randn(2, 8), torch.randn(4, 2)
    room = [torch.zeros(1, 1, 8, 8), torch.zeros(1, 1, 4, 8)]
    with pytest.raises(WorkerError, match="the weights inside the engine have the checksum 0"):
        check_in_place(checksum(room), checksum([a, b]))
    room[0][0, 0, :2], room[1][0, 0, :, :2] = a, b
    check_in_place(checksum(room), checksum([a, b]))


def test_every_response_of_a_run_has_a_different_seed() -> None:
    seeds = {request_seed(*place) for place in [(0, 1, 11, 1), (0, 1, 1, 11), (0, 11, 1, 1), (1, 1, 11, 1)]}
    assert len(seeds) == 4
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert request_seed(0, 1, 11, 1) == request_seed(0, 1, 11, 1)


def test_the_user_s_environment_takes_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine_environment(enforce_eager=True)["VLLM_LOGGING_LEVEL"] == os.environ.get("VLLM_LOGGING_LEVEL", "ERROR")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    assert engine_environment(enforce_eager=True)["VLLM_LOGGING_LEVEL"] == "DEBUG"


def test_only_an_eager_engine_disables_compilation() -> None:
    assert engine_environment(enforce_eager=True)["TORCHDYNAMO_DISABLE"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in engine_environment(enforce_eager=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bucket_bytes", "buckets"), [(1, 4), (400, 3), (10**6, 1)])
def test_weights_are_unchanged_by_buckets(dtype: torch.dtype, bucket_bytes: int, buckets: int) -> None:
    sizes = {torch.float32: (10, 40, 60, 90), torch.bfloat16: (20, 80, 120, 180)}[dtype]
    weights = [(f"weight {size}", torch.randn(2, size // 2).to(dtype)) for size in sizes]
    stored = [store(bucket) for bucket in pack(weights, dtype, bucket_bytes)]
    assert len(stored) == buckets
    for (name, tensor), (unpacked_name, unpacked) in zip(
        weights, (pair for bucket in stored for pair in checked(bucket).tensors()), strict=True
    ):
        assert name == unpacked_name
        assert torch.equal(tensor, unpacked)


def test_a_handle_names_its_device_where_it_is_replaced() -> None:
    """Receivers number their GPUs differently; a real handle needs a GPU."""
    names = list(inspect.signature(rebuild_cuda_tensor).parameters)
    assert names[DEVICE_IN_HANDLE] == "storage_device"


def test_a_changed_byte_changes_the_checksum() -> None:
    (bucket,) = map(store, pack([("weight", torch.randn(8))], torch.float32))
    bucket.data[3] ^= 1
    with pytest.raises(WorkerError, match="weights changed on the way"):
        checked(bucket)


@pytest.mark.parametrize("at_once", [1, 5, 1000])
def test_the_checksum_does_not_depend_on_how_weights_are_split_or_joined(
    monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr("trainer.weights.buckets.SHORT_WORDS_AT_ONCE", at_once)
    q, k = torch.randn(6, 4).bfloat16(), torch.randn(3, 4).bfloat16()
    assert checksum([q, k]) == checksum([torch.cat([k, q])])
    assert word_sum([q, k], torch.int64) == word_sum([torch.cat([k, q])], torch.int64)
    packed = pack([("q", q.float()), ("k", k.float())], torch.bfloat16, bucket_bytes=1)
    assert sum(bucket.packed_sum for bucket in packed) == word_sum([q, k], torch.int64)


def test_what_a_truncation_explains_is_no_disagreement() -> None:
    rollout = torch.tensor([[-1.0, -1.0, -1.0, -1.0]])
    trainer = torch.tensor([[-1.0, -1.2, -1.5, -0.7]])
    mask = torch.ones(1, 4, dtype=torch.bool)
    by_top_p = log_prob_agreement(rollout, trainer, mask, Truncation(top_p=0.8).smallest_mass)
    assert by_top_p["rollout/log_prob_difference"] == pytest.approx(0.3)
    assert by_top_p["rollout/log_prob_difference_mean"] == pytest.approx((0.5 + math.log(0.8) + 0.3) / 4)
    assert by_top_p["rollout/ratio_outside_tenth"] == 0.5
    by_top_k = log_prob_agreement(rollout, trainer, mask, Truncation(top_k=2).smallest_mass)
    assert by_top_k["rollout/log_prob_difference_mean"] == pytest.approx(0.3 / 4)


def test_truncation_keeps_the_likeliest_tokens_and_renormalises() -> None:
    log_probs = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    for truncation, kept in {
        Truncation(): [0.1, 0.4, 0.2, 0.3],
        Truncation(top_p=0.5): [0, 0.4, 0, 0.3],
        Truncation(top_p=0.71): [0, 0.4, 0.2, 0.3],
        Truncation(top_p=1e-6): [0, 0.4, 0, 0],
        Truncation(top_k=1): [0, 0.4, 0, 0],
        Truncation(top_k=9): [0.1, 0.4, 0.2, 0.3],
        Truncation(min_p=0.6): [0, 0.4, 0, 0.3],
        Truncation(top_k=3, top_p=0.8): [0, 0.4, 0.2, 0.3],  # 0.4 and 0.3 are 0.78 of the three
        Truncation(top_k=3, top_p=0.7): [0, 0.4, 0, 0.3],
    }.items():
        expected = torch.tensor([kept]) / sum(kept)
        torch.testing.assert_close(truncated(log_probs, [truncation]).exp(), expected)


def test_agreement_counts_ratios_and_ignores_masked_tokens() -> None:
    rollout = torch.tensor([[-1.0, -2.0, 0.0], [-1.0, -3.0, 0.0]])
    trainer = torch.tensor([[-1.0, -2.2, 9.0], [-1.05, -2.8, 9.0]])
    mask = torch.tensor([[True, True, False], [True, True, False]])
    results = log_prob_agreement(rollout, trainer, mask)
    assert results["rollout/log_prob_difference"] == pytest.approx(0.2)
    assert results["rollout/log_prob_difference_mean"] == pytest.approx(0.45 / 4)
    assert results["rollout/ratio_outside_tenth"] == 0.5  # exp(-0.2) and exp(0.2), not exp(-0.05)


def test_an_engine_without_memory_for_a_response_names_the_settings(model: Path) -> None:
    program = """
import sys
from pathlib import Path
from trainer.config.tree import Config
from trainer.errors import WorkerError
from trainer.rollout.vllm.engine import VllmEngine

try:
    settings = {"model": {"path": Path(sys.argv[1])}, "rollout": {"kv_cache_gib": 1e-5}}
    VllmEngine(Config.model_validate(settings), "cpu", [])
except WorkerError as error:
    print(f"{error}; {error.hint}")
"""
    run = subprocess.run(
        [sys.executable, "-c", program, model],
        env=environment() | engine_environment(enforce_eager=True),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert "vLLM does not start: " in run.stdout, run.stderr
    assert "if memory is short: the settings are rollout.kv_cache_gib" in run.stdout
