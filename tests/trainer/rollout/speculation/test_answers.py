"""vLLM engines that draft tokens, compared with engines that do not, and with networks that compute the same."""

from math import sqrt
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.rollout.conftest import VLLM, found_by

PROGRAM = Path(__file__).with_name("answers_program.py")
BEFORE = 7


@pytest.fixture(scope="module", params=VLLM)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return found_by(PROGRAM, tmp_path_factory.mktemp("speculation"), *request.param)


def test_responses_are_those_without_drafts_token_by_token(found: dict[str, Any]) -> None:
    """Greedy and sampled, with and without truncation; and where they end."""
    assert found["drafting"] == found["plain"]
    assert found["ended, drafting"] == found["ended, plain"]
    assert found["three tokens, drafting"] == found["three tokens, plain"]
    assert len({tuple(tokens) for tokens in found["plain"]}) > len(found["plain"]) / 2


def test_log_probs_are_the_network_s(found: dict[str, Any]) -> None:
    assert found["without log-probs to 1e-4, plain"] == 0
    assert found["without log-probs to 1e-4, drafting"] == 0


def test_drafts_are_accepted_and_rejected(found: dict[str, Any]) -> None:
    if "drafted" not in found:
        pytest.skip("counted in one process only")
    tokens = sum(map(len, found["plain"]))
    assert tokens / 10 < found["accepted"] < found["drafted"] - 50


@pytest.mark.parametrize("place", ["first", "second"])
def test_verified_tokens_follow_the_distribution_without_drafts(found: dict[str, Any], place: str) -> None:
    """Pearson's chi-squared statistic has mean `freedom` and variance 2 `freedom`."""
    if "verified" not in found:
        pytest.skip("sampled in one process only")
    pairs = list(zip(found["verified"][place], found["verified"][f"{place}, expected"], strict=True))
    assert min(expected for _, expected in pairs) >= 5
    freedom = len(pairs) - 1
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in pairs)
    assert abs(statistic - freedom) < 3 * sqrt(2 * freedom)


def test_responses_in_flight_do_not_notice_an_update_to_the_same_weights(found: dict[str, Any]) -> None:
    assert found["interrupted"] == found["plain"]
    assert found["most tokens before an update"] > BEFORE  # a step has added several


def test_log_probs_after_an_update_are_those_of_the_new_weights(found: dict[str, Any]) -> None:
    assert found["updated"] > 10
    assert found["disagreement after an update"] < 5e-4


def test_responses_are_drafted_up_to_the_longest_length(found: dict[str, Any]) -> None:
    if "drafted" not in found:
        pytest.skip("counted in one process only")
    assert found["drafted before the longest length"] > 0
