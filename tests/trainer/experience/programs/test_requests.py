"""Requests and outputs of programs that are unusual: legal ones work, nonsense costs the trajectory alone."""

from collections.abc import Callable
from typing import Any

import pytest

TOOLS = 'tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]\n'
CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ('ask(messages)\nprint("{\\"score\\": 1" + "0" * 400 + "}")', "its score is 1000"),
        ("ask(messages)\nprint('{\"score\": true}')", "its score is True"),
        ('ask([{"role": "assistant", "content": "so", "tool_calls": ["search"]}])', "message 0: tool_calls"),
        ('ask([{"role": "assistant", "content": "so", "tool_calls": "search"}])', "message 0: tool_calls"),
        ('ask([{"role": "assistant", "content": "so", "tool_calls": [{"id": "1"}]}])', "message 0: tool_calls"),
        ('ask(messages, tools=[{"function": {"name": "\\ud800f"}}])', "surrogates not allowed"),
        ('post_text("[" * 60000)', "the body is no JSON"),
    ],
)
def test_nonsense_costs_the_trajectory(play: Callable[..., Any], program: str, reason: str) -> None:
    (row,), _ = play(program, {"What?": "#### 19", "": "no"})
    assert reason in row.scored.failure
    assert row.done


def test_the_same_nonsense_in_a_later_turn(play: Callable[..., Any]) -> None:
    program = """
choice = ask(messages)
ask([*messages, dict(choice["message"], tool_calls=["search"]), {"role": "user", "content": "sure?"}])
"""
    (row,), _ = play(program)
    assert "message 1: tool_calls" in row.scored.failure


def test_output_that_is_no_score_leaves_it_to_the_reward(play: Callable[..., Any]) -> None:
    (row,), _ = play('ask(messages)\nprint("[" * 60000)')
    assert (row.done, row.scored) == (True, None)


def test_calls_that_nobody_can_read_are_text(play: Callable[..., Any]) -> None:
    program = 'assert not ask(messages, tools=tools)["message"].get("tool_calls")'
    (row,), _ = play(TOOLS + program, {"What?": f"<tool_call>{'[' * 3000}</tool_call>"}, limit=4000)
    assert row.scored is None


def test_a_question_that_no_command_can_hold_costs_its_trajectory(play: Callable[..., Any]) -> None:
    rows, _ = play("ask(messages)", {"What?": "#### 19", "": "no"}, ["a\0b What?", "What?"], arguments=["{question}"])
    assert "null byte" in rows[0].scored.failure
    assert rows[0].environment.failed
    assert [(row.done, row.turns) for row in rows] == [(True, 1), (True, 1)]
    assert rows[1].scored is None
