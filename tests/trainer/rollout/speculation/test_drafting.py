"""Drafts and the steps between them: neither changes a response."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.rollout.conftest import found_by
from trainer.rollout.speculation.acceptance import accepted_tokens

PLAYS = [
    "AsyncScheduler, prefix caching False",
    "AsyncScheduler, prefix caching True",
    "Scheduler, prefix caching True",
]


@pytest.fixture(scope="module")
def plays(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return found_by(Path(__file__).with_name("drafting_program.py"), tmp_path_factory.mktemp("plays"))


@pytest.mark.parametrize("name", PLAYS)
def test_responses_log_probs_and_ends_are_those_without_drafts(plays: dict[str, Any], name: str) -> None:
    for play in plays[name]:
        assert play["different"] == play["different log-probs"] == play["different ends"] == []


@pytest.mark.parametrize("name", PLAYS)
def test_vllms_records_are_those_of_its_own_steps(plays: dict[str, Any], name: str) -> None:
    assert [play["different from vLLM's own steps"] for play in plays[name]] == ["", ""]


@pytest.mark.parametrize("name", PLAYS)
def test_drafts_came_and_went_were_accepted_and_rejected_and_responses_were_taken_back(
    plays: dict[str, Any], name: str
) -> None:
    for play in plays[name]:
        assert play["responses"] > 100
        assert play["turned"] > 5
        assert min(play["steady"], play["quick"]) > 50
        assert play["tokens"] / 10 < play["accepted"] < play["drafted"] - 100
        assert play["taken back"] > 0
        assert play["left in the cache"] == 0


def test_an_engine_drafts_while_that_pays_and_only_then(plays: dict[str, Any]) -> None:
    assert plays["cheap"]["turned"] < 10
    assert plays["cheap"]["share"] > 0.8
    assert plays["dear"] == {"turned": 0, "share": 0}


def test_drafts_that_promise_more_than_they_keep_are_tried_ever_more_rarely(plays: dict[str, Any]) -> None:
    assert plays["dearer than it seemed"]["turned"] > 2
    assert plays["dearer than it seemed"]["share"] < 0.1


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[list[int], list[int]]]:
    """For each response its drafted tokens, and the tokens that are sampled in their places and after the last one."""
    token = st.integers(0, 2)
    responses = draw(st.lists(st.lists(token, max_size=4), min_size=1, max_size=5))
    return [(drafts, [draw(token) for _ in range(len(drafts) + 1)]) for drafts in responses]


@given(steps())
def test_a_response_gets_the_tokens_up_to_the_first_that_is_not_the_drafted_one(
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
