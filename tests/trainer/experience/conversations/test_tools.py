"""Conversations with tools and simulated users. A script takes the place of the policy; the rest is real."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.experience.conversations.scripted_policy import (
    GSM8K,
    JUDGE,
    TEMPLATE,
    call,
    check,
    converse,
    settings,
    spoken,
)
from trainer.config.sections.data import DataConfig
from trainer.data.formats.chat_template import use_chat_template
from trainer.experience.environment import MessageTokens
from trainer.experience.formats import hermes, llama3_json
from trainer.models.small import build_tokenizer


def test_tools_answer_and_the_policys_tokens_stay_as_they_were_sampled(tokenizer: Any, tmp_path: Path) -> None:
    row, said = converse(tokenizer, settings(tmp_path, GSM8K), [check("18"), check("19"), "#### 19"])
    assert spoken(tokenizer, row) == [
        "<|tool|>Current parsed answer='18' reward=0.0<|assistant|>",
        "<|tool|>Current parsed answer='19' reward=1.0<|assistant|>",
    ]
    assert row.sampled == [token for turn in said for token in turn]
    assert row.log_probs == [-0.5 if sampled else 0.0 for sampled in row.mask]
    assert (row.turns, row.answers, row.truncated, row.scored) == (3, 2, False, None)
    assert row.environment is not None
    assert row.environment.facts() == {"tool_rewards": [-0.05, 0.0], "turn_scores": []}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("said", "answered"),
    [
        (call("nothing"), "Unknown function 'nothing'. Available tools: ['calc_gsm8k_reward']"),
        (check("1").replace('"calc', '"kalc'), "Unknown function 'kalc_gsm8k_reward'"),
        (call("calc_gsm8k_reward", answer=1) + call("calc_gsm8k_reward", answer=2), "answer='1' reward=0.0"),
    ],
)
def test_the_policy_is_told_about_calls_that_fail(tokenizer: Any, tmp_path: Path, said: str, answered: str) -> None:
    row, _ = converse(tokenizer, settings(tmp_path, GSM8K), [said, "#### 19"])
    (answer,) = spoken(tokenizer, row)
    assert answered in answer
    assert row.turns == 2


def test_a_tool_that_returns_nonsense_is_a_call_that_fails(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nonsense(*_arguments: Any, **_kwargs: Any) -> tuple[str, float, None]:
        return "19", 0.0, None

    monkeypatch.setattr("trainer.experience.tools.gsm8k.AnswerCheck.execute", nonsense)
    row, _ = converse(tokenizer, settings(tmp_path, GSM8K), [check("1"), "#### 19"])
    (answer,) = spoken(tokenizer, row)
    assert "Error executing tool 'calc_gsm8k_reward': 'str' object has no attribute 'image'" in answer
    agent: Any = row.environment
    assert (row.turns, row.scored, agent.failed_calls) == (2, None, 1)


def test_a_call_that_cannot_be_read_is_no_call(tokenizer: Any, tmp_path: Path) -> None:
    row, _ = converse(tokenizer, settings(tmp_path, GSM8K), ["<tool_call>{name: x}</tool_call>"])
    assert (row.turns, all(row.mask)) == (1, True)


def test_formats_of_calls() -> None:
    assert [(c.name, json.loads(c.arguments)) for c in hermes.parse(f"so {call('a', x=1)} and {call('b')}<|end|>")] == [
        ("a", {"x": 1}),
        ("b", {}),
    ]
    text = '<|python_tag|>{"name": "a", "parameters": {"x": "{;}"}}; {"name": "b", "parameters": {}}<|eot_id|>'
    assert [(c.name, json.loads(c.arguments)) for c in llama3_json.parse(text)] == [("a", {"x": "{;}"}), ("b", {})]
    assert llama3_json.parse("I think {this}") == llama3_json.parse('{"name": "a"}') == []


@pytest.mark.parametrize(
    ("side", "shown"),
    [("left", "(truncated)...=1.0"), ("right", "Curr...(truncated)"), ("middle", "Cu...(truncated)....0")],
)
def test_long_answers_are_shortened(tokenizer: Any, tmp_path: Path, side: str, shown: str) -> None:
    config = settings(tmp_path, GSM8K, tools={"max_response_length": 4, "truncate_side": side})
    row, _ = converse(tokenizer, config, [check("19"), "."])
    assert spoken(tokenizer, row) == [f"<|tool|>{shown}<|assistant|>"]


def test_several_calls_of_a_turn_run_up_to_the_limit(tokenizer: Any, tmp_path: Path) -> None:
    config = settings(tmp_path, GSM8K, tools={"max_parallel_calls": 2})
    row, _ = converse(tokenizer, config, [check("1") + check("19") + check("2"), "."])
    (answers,) = spoken(tokenizer, row)
    assert (
        answers
        == "<|tool|>Current parsed answer='1' reward=0.0<|tool|>Current parsed answer='19' reward=1.0<|assistant|>"
    )


def test_the_last_turn_calls_no_tool(tokenizer: Any, tmp_path: Path) -> None:
    row, _ = converse(tokenizer, settings(tmp_path, GSM8K, max_turns=2), [check("1"), check("2")])
    agent: Any = row.environment
    assert (row.turns, row.answers, agent.calls) == (2, 1, 1)


def test_a_simulated_user_answers_turns_without_a_call(tokenizer: Any, tmp_path: Path) -> None:
    config = settings(tmp_path, GSM8K, users=[JUDGE])
    asked = {"interaction_kwargs": {"name": "judge", "ground_truth": "19"}}
    row, _ = converse(tokenizer, config, ["#### 18", check("19"), "#### 19"], **asked)
    first, second = spoken(tokenizer, row)
    assert first.startswith("<|user|>Your response is incorrect!")
    assert second.startswith("<|tool|>")
    assert row.environment is not None
    assert row.environment.facts()["turn_scores"] == [0.0, 1.0]  # type: ignore[attr-defined]
    assert (row.turns, row.answers) == (3, 3)


def test_thoughts_of_earlier_turns_stay_as_they_were_sampled(tokenizer: Any) -> None:
    """A template like Qwen3's: it writes an empty thought into the last turn only."""
    template = TEMPLATE.replace(
        "{{ '<|' + message.role + '|>' + message.content }}",
        "{{ '<|' + message.role + '|>' }}"
        "{% if message.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ message.content }}",
    )
    custom = use_chat_template(build_tokenizer(["19"]), DataConfig(chat_template=template))
    tokens = MessageTokens(custom, DataConfig())([{"role": "tool", "content": "19"}], custom.eos_token_id)
    assert custom.decode(tokens) == "<|tool|>19<|assistant|>"
