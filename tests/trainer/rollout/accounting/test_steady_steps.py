"""Steady steps change nothing: not a response, not what vLLM's workers are told, not vLLM's own records."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.rollout.conftest import REPOSITORY, found_by

PLAYS = [
    f"{kind}, runner {runner}, prefix caching {caching}"
    for kind in ("Scheduler", "AsyncScheduler")
    for runner in (1, 2)
    for caching in (False, True)
]


@pytest.fixture(scope="module")
def plays(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return found_by(Path(__file__).with_name("steady_steps_program.py"), tmp_path_factory.mktemp("plays"))


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return found_by(Path(__file__).with_name("steady_answers_program.py"), tmp_path_factory.mktemp("answers"))


@pytest.mark.parametrize("name", PLAYS)
def test_every_step_and_vllms_records_after_it_are_the_same(plays: dict[str, Any], name: str) -> None:
    assert [play["different"] for play in plays[name]] == ["", "", ""]


@pytest.mark.parametrize("name", PLAYS)
def test_responses_came_to_every_kind_of_end_and_were_taken_back(plays: dict[str, Any], name: str) -> None:
    for play in plays[name]:
        assert play["taken"] > 300
        assert play["taken back"] > 0  # the cache was too small for all at once
        assert min(play["ended"].count("stop"), play["ended"].count("length"), play["aborted"]) > 20


@pytest.mark.parametrize("kind", ["Scheduler", "AsyncScheduler"])
def test_responses_that_wait_enter_several_at_a_time_and_get_the_same_tokens(plays: dict[str, Any], kind: str) -> None:
    at_once, soon, later = plays["entries"][kind].values()
    assert at_once["tokens"] == soon["tokens"] == later["tokens"]
    assert at_once["steps of vLLM"] > 1.4 * later["steps of vLLM"]


@pytest.mark.parametrize("kind", ["Scheduler", "AsyncScheduler"])
def test_no_response_waits_for_long_for_others_to_enter_with_it(plays: dict[str, Any], kind: str) -> None:
    waits = {int(wait): found["longest wait"] for wait, found in plays["entries"][kind].items()}
    assert all(found <= wait for wait, found in waits.items())
    assert plays["entries"][kind][str(max(waits))]["rounds"] < 1.5 * plays["entries"][kind]["0"]["rounds"]


def test_responses_and_log_probs_are_the_same(answers: dict[str, Any]) -> None:
    assert answers["with"] == answers["without"]
    assert answers["taken"] > 150


def test_responses_that_have_ended_leave_memory(answers: dict[str, Any]) -> None:
    assert answers["kept"] < 8  # of 32: those of the last steps


def test_vllm_takes_all_steps_if_it_is_another_version_or_looks_for_stop_strings(answers: dict[str, Any]) -> None:
    assert (answers["another version"], answers["stop strings"]) == (None, None)


def test_a_version_is_known_whatever_device_it_was_built_for(answers: dict[str, Any]) -> None:
    assert answers["against another build"] is None


def test_the_versions_in_images_are_known(answers: dict[str, Any]) -> None:
    matrix = (REPOSITORY / "images" / "matrix.toml").read_text()
    versions = set(re.findall(r'"vllm(?:-cpu)?==([\d.]+)"', matrix)) | set(re.findall(r"rocm:v([\d.]+)", matrix))
    assert len(versions) > 1
    assert versions <= set(answers["versions"])
