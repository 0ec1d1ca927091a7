"""The experts that engines record, compared with networks that choose by themselves, and replayed in one that would
choose others."""

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.rollout.conftest import results_of

PROGRAM = Path(__file__).with_name("routes_program.py")
ENGINES = ["transformers", "vllm"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return {engine: results_of(PROGRAM, tmp_path_factory.mktemp(engine), engine) for engine in ENGINES}


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_records_the_choices_of_a_network_with_its_weights(results: dict[str, Any], engine: str) -> None:
    assert results[engine]["agreement"] > 0.999  # rounding may decide between two experts
    assert results[engine]["difference"] < 1e-4


@pytest.mark.parametrize("engine", ENGINES)
def test_a_network_with_other_choices_computes_the_engines_log_probs_when_it_replays(
    results: dict[str, Any], engine: str
) -> None:
    assert results[engine]["difference of other choices"] > 1
    assert results[engine]["difference of other choices, replayed"] < 1e-4


@pytest.mark.parametrize("engine", ENGINES)
def test_every_token_but_the_last_has_a_record(results: dict[str, Any], engine: str) -> None:
    assert results[engine]["unrecorded"] == 0
    for (prompt, response), segments in zip(results[engine]["lengths"], results[engine]["segments"], strict=True):
        ends = [end for _, end in segments]
        assert ends == ([prompt, prompt + response - 1] if response > 1 else [prompt])
        assert segments[0][0] == 0 or engine == "vllm"  # whose prefix cache may have the start of a prompt


@pytest.mark.parametrize("engine", ENGINES)
def test_only_what_was_asked_for_is_recorded(results: dict[str, Any], engine: str) -> None:
    assert results[engine]["unasked"] == [0]
    prompt, response, segments = results[engine]["continued"]
    assert segments == [[prompt - 1, prompt], [prompt, prompt + response - 1]][: 1 + (response > 1)]


def test_the_start_of_a_prompt_in_the_prefix_cache_is_recorded_once(results: dict[str, Any]) -> None:
    first, again = results["vllm"]["cached"]["segments"]
    assert first[0] == [0, 150]
    assert again[0][0] == 128
    assert again[0][1] == 150
    assert results["vllm"]["cached"]["unrecorded"] == 0


def test_the_fast_path_records_too(results: dict[str, Any]) -> None:
    assert results["vllm"]["steps of the fast path"] > 50


def test_parts_of_responses_in_flight_have_the_records_of_whole_ones(results: dict[str, Any]) -> None:
    assert all(results["vllm"]["parts"])


def test_choices_are_those_of_the_weights_at_the_time(results: dict[str, Any]) -> None:
    assert results["vllm"]["agreement before an update"] > 0.999
    assert results["vllm"]["agreement after it"] < 0.5
