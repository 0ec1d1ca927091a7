"""Drafts change no response: simulated schedulers, vLLM engines with and without drafts, and networks that compute the
same."""

from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.rollout.conftest import VLLM, results_of
from trainer.rollout.vllm.verification import accepted_tokens

BEFORE = 7
CASES = [
    "AsyncScheduler, prefix caching False",
    "AsyncScheduler, prefix caching True",
    "Scheduler, prefix caching True",
]


@pytest.fixture(scope="module", params=VLLM)
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    program = Path(__file__).with_name("speculation_program.py")
    return results_of(program, tmp_path_factory.mktemp("speculation"), *request.param)


@pytest.mark.parametrize("case", CASES)
def test_responses_and_vllms_records_equal_those_without_drafts_and_without_the_fast_path(
    simulations: dict[str, Any], case: str
) -> None:
    for result in simulations["drafts"][case]:
        assert result["different records"] == ""
        assert result["different responses"] == []
        assert result["left in the cache"] == 0


@pytest.mark.parametrize("case", CASES)
def test_simulated_drafts_come_and_go_are_accepted_and_rejected(simulations: dict[str, Any], case: str) -> None:
    for result in simulations["drafts"][case]:
        assert result["responses"] > 100
        assert result["switches"] > 5
        assert min(result["fast steps"], result["drafted steps"]) > 50
        assert result["tokens"] / 10 < result["accepted"] < result["drafted"] - 100
        assert result["preempted"] > 0


def test_an_engine_drafts_only_while_drafts_pay(simulations: dict[str, Any]) -> None:
    decisions = simulations["decisions"]
    assert decisions["cheap"]["switches"] < 10
    assert decisions["cheap"]["share"] > 0.8
    assert decisions["expensive"] == {"switches": 0, "share": 0}


def test_drafts_that_cost_more_than_assumed_are_tried_ever_more_rarely(simulations: dict[str, Any]) -> None:
    decision = simulations["decisions"]["more expensive than assumed"]
    assert decision["switches"] > 2
    assert decision["share"] < 0.1


def test_an_engines_responses_equal_those_without_drafts(engines: dict[str, Any]) -> None:
    """Greedy and sampled, with and without truncation; and where they end."""
    assert engines["drafting"] == engines["plain"]
    assert engines["ended, drafting"] == engines["ended, plain"]
    assert engines["three tokens, drafting"] == engines["three tokens, plain"]
    assert len({tuple(tokens) for tokens in engines["plain"]}) > len(engines["plain"]) / 2


def test_an_engines_log_probs_equal_the_networks(engines: dict[str, Any]) -> None:
    assert engines["without log-probs to 1e-4, plain"] == 0
    assert engines["without log-probs to 1e-4, drafting"] == 0


def test_an_engines_drafts_are_accepted_and_rejected_up_to_the_maximum_length(engines: dict[str, Any]) -> None:
    if "drafted" not in engines:
        pytest.skip("counted in one process only")
    tokens = sum(map(len, engines["plain"]))
    assert tokens / 12 < engines["accepted"] < engines["drafted"] - 50
    assert engines["drafted before the longest length"] > 0


@pytest.mark.parametrize("place", ["first", "second"])
def test_verified_tokens_follow_the_distribution_without_drafts(engines: dict[str, Any], place: str) -> None:
    """Pearson's chi-squared statistic has mean `freedom` and variance 2 `freedom`."""
    if "verified" not in engines:
        pytest.skip("sampled in one process only")
    pairs = list(zip(engines["verified"][place], engines["verified"][f"{place}, expected"], strict=True))
    assert min(expected for _, expected in pairs) >= 5
    freedom = len(pairs) - 1
    statistic = sum((count - expected) ** 2 / expected for count, expected in pairs)
    assert abs(statistic - freedom) < 3 * sqrt(2 * freedom)


def test_an_update_to_the_same_weights_changes_no_response_in_flight(engines: dict[str, Any]) -> None:
    assert engines["interrupted"] == engines["plain"]
    assert engines["most tokens before an update"] > BEFORE  # a step has added several


def test_log_probs_after_an_update_equal_those_of_the_new_weights(engines: dict[str, Any]) -> None:
    assert engines["updated"] > 10
    assert engines["disagreement after an update"] < 5e-4


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[list[int], list[int]]]:
    """For each response its drafted tokens, and the tokens that are sampled in their places and after the last one."""
    token = st.integers(0, 2)
    responses = draw(st.lists(st.lists(token, max_size=4), min_size=1, max_size=5))
    return [(drafts, [draw(token) for _ in range(len(drafts) + 1)]) for drafts in responses]


@given(steps())
def test_a_response_gets_the_tokens_up_to_the_first_that_differs_from_its_draft(
    step: list[tuple[list[int], list[int]]],
) -> None:
    inputs = [token for drafts, _ in step for token in (9, *drafts)]  # 9: the token that was sampled last
    sampled = [token for _, tokens in step for token in tokens]
    first = torch.tensor([0, *(len(tokens) for _, tokens in step)]).cumsum(0)
    width = max(len(tokens) for _, tokens in step)
    tokens, counts = accepted_tokens(torch.tensor(sampled), torch.tensor(inputs), first, width)
    for (drafts, expected), row, count in zip(step, tokens.tolist(), counts.tolist(), strict=True):
        wrong = next((place for place, draft in enumerate(drafts) if draft != expected[place]), len(drafts))
        assert row[:count] == expected[: wrong + 1]
