"""vLLM's responses while its weights change, compared with networks that compute the same."""

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.rollout.conftest import VLLM, results_of

PROGRAM = Path(__file__).with_name("in_flight_program.py")
BEFORE, AT_ONCE, LONG = 7, 4, 300


@pytest.fixture(scope="module", params=VLLM)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return results_of(PROGRAM, tmp_path_factory.mktemp("in-flight"), *request.param)


@pytest.mark.parametrize("decoding", ["greedy", "sampled"])
def test_an_update_to_the_same_weights_changes_no_token(results: dict[str, Any], decoding: str) -> None:
    assert results[decoding]["same"] == results[decoding]["whole"]
    assert max(map(len, results[decoding]["whole"])) > 2 * BEFORE  # so that the update is in the middle


@pytest.mark.parametrize("decoding", ["greedy", "sampled"])
def test_an_update_changes_the_tokens_after_it(results: dict[str, Any], decoding: str) -> None:
    long = [row for row, sizes in enumerate(results[decoding]["sizes"]) if len(sizes) > 1]
    assert len(long) >= AT_ONCE / 2
    for row in long:
        first = results[decoding]["sizes"][row][0]
        assert first <= BEFORE
        assert results[decoding]["other"][row][:first] == results[decoding]["whole"][row][:first]
    assert any(results[decoding]["other"][row] != results[decoding]["whole"][row] for row in long)
    assert all(results[decoding]["finished"])


@pytest.mark.parametrize("decoding", ["greedy", "sampled"])
def test_log_probs_are_those_of_the_weights_at_the_time_with_the_keys_and_values_of_earlier_ones(
    results: dict[str, Any], decoding: str
) -> None:
    """Responses that waited for a place are the new weights' alone."""
    assert max(results[decoding]["disagreement"]) < 5e-4
    interrupted = [row for row, sizes in enumerate(results[decoding]["sizes"]) if len(sizes) > 1]
    assert min(results[decoding]["disagreement with new keys"][row] for row in interrupted) > 1e-3


def test_nothing_is_read_again_after_an_update(results: dict[str, Any]) -> None:
    if "scheduled" not in results:
        pytest.skip("counted in one process only")
    counts = results["scheduled"]
    assert sum(counts["before"]) > counts["prompts"]  # the prompts, then a token for each response
    assert counts["after"] == [counts["under way"]] * len(counts["after"])
    assert counts["under way"] > 1


def test_a_new_request_never_reads_what_older_weights_cached(results: dict[str, Any]) -> None:
    if "scheduled" not in results:
        pytest.skip("counted in one process only")
    counts = results["scheduled"]
    assert counts["the same prompt"] >= LONG
    assert counts["disagreement"] < 5e-4
    assert counts["the same prompt again"] < LONG / 2  # the weights are the same, so the cache serves it


def test_an_engine_that_slept_has_forgotten_its_responses(results: dict[str, Any]) -> None:
    if "asleep" not in results:
        pytest.skip("looked at in one process only")
    assert results["asleep"]["in flight"] == 0
    assert results["asleep"]["tokens"] == results["asleep"]["whole"]
