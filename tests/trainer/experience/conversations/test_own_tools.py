"""A tool that a user wrote for verl, and entries of a tools file that are refused."""

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.experience.conversations.scripted_policy import FakeEngines, call, converse, schema, settings, spoken
from trainer.errors import ConfigError
from trainer.experience.conversations.sampler import Conversations

ALIASES = Path(__file__).parents[4] / "images" / "aliases"


OWN = """
import asyncio
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op

ended = []

class Echo(BaseTool):
    def get_openai_tool_schema(self):
        function = {"name": "echo", "description": "repeats", "parameters": {"type": "object", "properties": {}}}
        return OpenAIFunctionToolSchema(type="function", function=function)

    async def create(self, instance_id=None, **kwargs):
        self.secret = kwargs["create_kwargs"].get("secret")
        return await super().create(instance_id)

    @rollout_trace_op
    async def execute(self, instance_id, parameters, **kwargs):
        await asyncio.sleep(0)
        if parameters.get("text") == "fail":
            raise KeyError("broken")
        seen = len(kwargs["agent_data"].messages)
        return ToolResponse(text=f"{parameters['text']} {self.secret} {seen}"), 0.25, {}

    async def release(self, instance_id, **kwargs):
        ended.append(instance_id)
"""


@pytest.fixture
def own_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of the user with a tool for verl, in the working directory."""
    (tmp_path / "own_tools.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ALIASES))
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_tool_written_for_verl_runs_unchanged(tokenizer: Any, own_package: Path) -> None:
    config = settings(own_package, {"class_name": "own_tools.Echo", "config": {"type": "native"}})
    kwargs = {"tools_kwargs": {"echo": {"create_kwargs": {"secret": "x", "absent": None}}}}
    lines = [call("echo", text="a"), call("echo", text="fail"), "done"]
    row, _ = converse(tokenizer, config, lines, **kwargs)
    assert spoken(tokenizer, row) == [
        "<|tool|>a x 2<|assistant|>",
        "<|tool|>Error executing tool 'echo': 'broken'<|assistant|>",
    ]
    agent: Any = row.environment
    assert (agent.calls, agent.failed_calls, agent.facts()["tool_rewards"]) == (2, 1, [0.25, 0.0])
    assert len(sys.modules["own_tools"].ended) == 2


def test_an_answer_that_is_not_valid_unicode_is_a_failed_call(tokenizer: Any, own_package: Path) -> None:
    config = settings(own_package, {"class_name": "own_tools.Echo"})
    row, _ = converse(tokenizer, config, [call("echo", text="\ud83d"), "done"])
    assert "surrogates not allowed" in spoken(tokenizer, row)[0]
    assert row.scored is None


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"class_name": "no_such_package.Tool"}, "no_such_package.Tool cannot be imported: ModuleNotFoundError"),
        ({"class_name": "own_tools.Absent"}, "own_tools.Absent cannot be imported: AttributeError"),
        ({"class_name": "verl.tools.image_zoom_in_tool.ImageZoomInTool"}, "there is no vision"),
        ({"class_name": "verl.tools.mcp_search_tool.MCPSearchTool"}, "there is no MCP client"),
        ({"class_name": "verl.tools.gsm8k_tool.Gsm8kTool"}, "has no schema"),
        ({"class_name": "verl.tools.search_tool.SearchTool", "tool_schema": schema("s")}, "no retrieval_service_url"),
    ],
)
def test_a_tool_that_cannot_be_made_is_refused(
    tokenizer: Any, own_package: Path, entry: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        Conversations(settings(own_package, entry), FakeEngines(tokenizer), tokenizer)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("execute(self, instance_id, parameters, **kwargs)", "execute(self, instance_id, parameters)"), "agent_data"),
        (("release(self, instance_id, **kwargs)", "release(self)"), "too many positional arguments"),
        (("create(self, instance_id=None, **kwargs)", "create(self, instance_id)"), "instance_id"),
    ],
)
def test_a_tool_that_cannot_be_called_is_refused(
    tokenizer: Any, own_package: Path, monkeypatch: pytest.MonkeyPatch, change: tuple[str, str], words: str
) -> None:
    assert change[0] in OWN
    monkeypatch.delitem(sys.modules, "own_tools", raising=False)
    source = OWN.replace(*change).replace("    @rollout_trace_op\n", "")
    (own_package / "own_tools.py").write_text(source)
    config = settings(own_package, {"class_name": "own_tools.Echo", "config": {}})
    engines: Any = FakeEngines(tokenizer)
    with pytest.raises(ConfigError, match=f"cannot be called as it will be: .*{words}"):
        Conversations(config, engines, tokenizer)


def test_a_user_that_cannot_be_called_is_refused(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_users.py").write_text(
        "class User:\n"
        "    def __init__(self, config): ...\n"
        "    async def start_interaction(self, instance_id=None, **kwargs): ...\n"
        "    async def generate_response(self, messages): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    engines: Any = FakeEngines(tokenizer)
    config = settings(tmp_path, users=[{"name": "user", "class_name": "own_users.User", "config": {}}])
    with pytest.raises(ConfigError, match=r"generate_response.* cannot be called as it will be"):
        Conversations(config, engines, tokenizer)
