"""Requests and outputs of programs that are unusual: legal ones work, nonsense costs the trajectory alone."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.trainer.experience.conversations.scripted_policy import pieces

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


def test_a_turn_of_calls_alone_may_leave_out_its_content(tokenizer: Any, play: Callable[..., Any]) -> None:
    program = """
said = ask(messages, tools=tools)["message"]
said = {name: value for name, value in said.items() if value is not None}
assert "content" not in said, said
ask([*messages, said, {"role": "tool", "content": "19", "tool_call_id": "1"}], tools=tools)
"""
    (row,), _ = play(TOOLS + program, {"What?": CALL, "<|tool|>19": "yes"})
    assert row.scored is None
    assert pieces(tokenizer, row)[1] == ("<|tool|>19<|assistant|>", False)


def test_a_request_may_do_without_calls(play: Callable[..., Any]) -> None:
    program = f"""
choice = ask(messages, tools=tools, tool_choice="none")
assert choice["finish_reason"] == "stop" and "tool_calls" not in choice["message"], choice
assert choice["message"]["content"] == {CALL!r}, choice
choice = ask([*messages, choice["message"], {{"role": "user", "content": "sure?"}}], tools=tools)
assert choice["finish_reason"] == "tool_calls", choice
"""
    (row,), _ = play(TOOLS + program, {"What?": CALL, "sure?": CALL})
    assert row.scored is None


QWEN = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' + (message.content or '') }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}"
    "{% if message.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_arguments_are_rendered_as_a_mapping_and_developers_speak_as_the_system(
    tokenizer: Any, play: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", QWEN)
    program = """
call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
said = {"role": "assistant", "content": None, "tool_calls": [call]}
messages = [{"role": "developer", "content": "no"}, said, *messages]
choice = ask(messages)
ask([*messages, choice["message"], {"role": "user", "content": "sure?"}])
"""
    (row,), _ = play(program)
    assert row.scored is None
    assert tokenizer.decode(row.prompt) == '<|system|>no<|assistant|>{"x": 1}<|end|><|user|>What?<|assistant|>'


def test_the_model_can_be_looked_up_by_name(play: Callable[..., Any]) -> None:
    program = """
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
for name, status in ((os.environ["OPENAI_MODEL"], 200), ("other", 404)):
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/models/" + name, headers=headers)
    try:
        reply = urllib.request.urlopen(request)
        assert (reply.status, json.load(reply)["id"]) == (status, name)
    except urllib.error.HTTPError as error:
        assert error.code == status, error.code
ask(messages)
"""
    (row,), _ = play(program)
    assert row.scored is None
