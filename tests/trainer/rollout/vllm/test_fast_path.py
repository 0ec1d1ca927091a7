"""The decode fast path changes no response, nothing that vLLM's workers are told, and none of vLLM's records."""

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.rollout.conftest import results_of

SCHEDULERS = ["Scheduler", "AsyncScheduler"]
CASES = [
    f"{kind}, runner {runner}, prefix caching {caching}"
    for kind in SCHEDULERS
    for runner in (1, 2)
    for caching in (False, True)
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return results_of(Path(__file__).with_name("fast_path_program.py"), tmp_path_factory.mktemp("answers"))


@pytest.mark.parametrize("case", CASES)
def test_steps_and_records_equal_vllms_own(simulations: dict[str, Any], case: str) -> None:
    assert [result["different"] for result in simulations[case]] == ["", ""]


@pytest.mark.parametrize("case", CASES)
def test_simulated_responses_stop_reach_their_length_are_aborted_and_preempted(
    simulations: dict[str, Any], case: str
) -> None:
    for result in simulations[case]:
        assert result["fast steps"] > 300
        assert result["preempted"] > 0
        assert min(result["ended"].count("stop"), result["ended"].count("length"), result["aborted"]) > 20


@pytest.mark.parametrize("case", CASES)
def test_vllm_allocates_once_per_block_instead_of_once_per_token(simulations: dict[str, Any], case: str) -> None:
    for result in simulations[case]:
        fast, skipping, own_steps = result["allocations"]
        assert fast < skipping < own_steps / 5


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_waiting_responses_are_admitted_together_and_get_the_same_tokens(
    simulations: dict[str, Any], kind: str
) -> None:
    at_once, soon, later = simulations["admissions"][kind].values()
    assert at_once["tokens"] == soon["tokens"] == later["tokens"]
    assert at_once["vllm steps"] > 1.4 * later["vllm steps"]


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_admission_waits_no_longer_than_its_limit(simulations: dict[str, Any], kind: str) -> None:
    by_limit = {int(limit): result for limit, result in simulations["admissions"][kind].items()}
    assert all(result["longest wait"] <= limit for limit, result in by_limit.items())
    assert by_limit[max(by_limit)]["rounds"] < 1.5 * by_limit[0]["rounds"]


def test_responses_and_log_probs_equal_those_without_the_fast_path(answers: dict[str, Any]) -> None:
    assert answers["with"] == answers["without"]
    assert answers["fast steps"] > 150


def test_ended_responses_leave_memory(answers: dict[str, Any]) -> None:
    assert answers["kept"] < 8  # of 32: those of the last steps


def test_an_engine_says_in_one_line_that_the_fast_path_is_off_and_why(answers: dict[str, Any]) -> None:
    assert answers["notices"] == []  # a build for another device is the same version
    (notice,) = answers["notices of another version"]
    assert notice.startswith("vLLM 0.99.0 runs without the decode fast path: vLLM 0.99.0 is not among")
    (notice,) = answers["notices with stop strings"]
    assert notice.endswith("runs without the decode fast path: stop strings are searched in every token's text")


def test_an_engine_core_in_a_process_of_its_own_is_refused(answers: dict[str, Any]) -> None:
    assert answers["refused"].startswith("VLLM_ENABLE_V1_MULTIPROCESSING is not 0: ")
