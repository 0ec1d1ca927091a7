"""Conversations in which a script takes the place of the policy; tools and simulated users are real."""

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import yaml

from trainer.config.tree import Config
from trainer.data.dataset import Prompt
from trainer.experience.conversations.sampler import Conversations
from trainer.experience.trajectory import Trajectory
from trainer.rollout.sampling import Response, SamplingRequest

TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content }}"
    "{% if message.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def schema(name: str, *parameters: str) -> dict[str, Any]:
    properties = {parameter: {"type": "string", "description": "one"} for parameter in parameters}
    function = {
        "name": name,
        "description": "a tool",
        "parameters": {"type": "object", "properties": properties, "required": [*parameters]},
    }
    return {"type": "function", "function": function}


GSM8K = {
    "class_name": "verl.tools.gsm8k_tool.Gsm8kTool",
    "config": {"type": "native"},
    "tool_schema": schema("calc_gsm8k_reward", "answer"),
}


JUDGE = {"name": "judge", "class_name": "verl.interactions.gsm8k_interaction.Gsm8kInteraction", "config": {}}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def check(answer: str) -> str:
    return call("calc_gsm8k_reward", answer=answer)


class FakeEngines:
    """Says each conversation's next line; conversations have different prompts."""

    version = 0
    in_flight = False

    def __init__(self, tokenizer: Any, *lines: Sequence[str]) -> None:
        self._words = [[tuple(tokenizer(line + "<|end|>")["input_ids"]) for line in turns] for turns in lines]
        self._prompts: list[tuple[int, ...]] = []
        self.said: list[list[tuple[int, ...]]] = [[] for _ in lines]

    def generate(self, requests: Sequence[SamplingRequest], homes: Sequence[int] | None) -> list[Response]:
        assert homes is not None
        if not self._prompts:
            self._prompts = [request.prompt for request in requests]
        return [self._next(request) for request in requests]

    def _next(self, request: SamplingRequest) -> Response:
        whose = next(n for n, prompt in enumerate(self._prompts) if request.prompt[: len(prompt)] == prompt)
        words = self._words[whose].pop(0)
        self.said[whose].append(words)
        return Response(words, tuple(-0.5 for _ in words), ended=True)


def settings(
    tmp_path: Path, *tools: Mapping[str, Any], users: Sequence[Mapping[str, Any]] = (), **rollout: Any
) -> Config:
    data: dict[str, Any] = {"max_response_length": 2000}
    if tools:
        (tmp_path / "tools.yaml").write_text(yaml.safe_dump({"tools": [*tools]}))
        data["tools_file"] = tmp_path / "tools.yaml"
    if users:
        (tmp_path / "users.yaml").write_text(yaml.safe_dump({"interaction": [*users]}))
        rollout["interactions_file"] = tmp_path / "users.yaml"
    return Config.model_validate({"rollout": {"agent": "tools", **rollout}, "data": data})


def converse(
    tokenizer: Any, config: Config, lines: Sequence[str], **info: Any
) -> tuple[Trajectory, list[tuple[int, ...]]]:
    """One conversation in which the policy says these lines, and the tokens that it said."""
    info = {"tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "19"}}}, **info}
    engines = FakeEngines(tokenizer, lines)
    with closing(Conversations(config, engines, tokenizer)) as conversations:  # type: ignore[arg-type]
        (row,) = conversations.begin([Prompt(0, (1, 2), "19", "openai/gsm8k", "What?", info)], [100], temperature=1.0)
        conversations.finish([row])
    return row, engines.said[0]


def pieces(tokenizer: Any, row: Trajectory) -> list[tuple[str, bool]]:
    """The conversation as pieces of text, each with whether the policy said it."""
    parts: list[tuple[list[int], bool]] = []
    for token, sampled in zip(row.token_ids, row.mask, strict=True):
        if not parts or parts[-1][1] != sampled:
            parts.append(([], sampled))
        parts[-1][0].append(token)
    return [(tokenizer.decode(tokens), sampled) for tokens, sampled in parts]


def spoken(tokenizer: Any, row: Trajectory) -> list[str]:
    """What the tools and users said, up to the next turn of the policy."""
    return [text for text, sampled in pieces(tokenizer, row) if not sampled]
