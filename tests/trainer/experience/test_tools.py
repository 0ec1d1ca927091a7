"""Conversations with tools and simulated users. A script replaces the policy; tools, sandbox and servers are real."""

import json
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from trainer.config.data import DataConfig
from trainer.config.tree import Config
from trainer.data.dataset import Prompt, PromptDataset, PromptSampler
from trainer.data.formats.chat_template import use_chat_template
from trainer.data.formats.tool_schema import OpenAIFunctionToolSchema
from trainer.errors import ConfigError, DataError
from trainer.experience.agents import check_agents
from trainer.experience.collector import Collector
from trainer.experience.conversations import Conversations
from trainer.experience.coroutines import wait_for
from trainer.experience.environment import MessageTokens
from trainer.experience.formats import hermes, llama3_json
from trainer.experience.run_data import RunData
from trainer.experience.tools.code import CodeInterpreter
from trainer.experience.tools.search import Search
from trainer.experience.trajectory import Trajectory
from trainer.models.small import build_tokenizer
from trainer.rewards.answer import Answer, Scored
from trainer.rollout.sampling import Response, SamplingRequest

ALIASES = Path(__file__).parents[3] / "images" / "aliases"
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


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def check(answer: str) -> str:
    return call("calc_gsm8k_reward", answer=answer)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    texts = ["What is 12 + 7? #### 19 answer reward Current parsed", check("19"), "tool user assistant"]
    return use_chat_template(build_tokenizer(texts), DataConfig(chat_template=TEMPLATE))


class FakeEngines:
    """Says each conversation's next line; conversations have different prompts."""

    version = 0

    def __init__(self, tokenizer: Any, *lines: Sequence[str]) -> None:
        self._words = [[tuple(tokenizer(line + "<|end|>")["input_ids"]) for line in own] for own in lines]
        self._prompts: list[tuple[int, ...]] = []
        self.said: list[list[tuple[int, ...]]] = [[] for _ in lines]

    def generate(self, requests: Sequence[SamplingRequest], homes: None) -> list[Response]:
        assert homes is None
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
    conversations = Conversations(config, engines, tokenizer)  # type: ignore[arg-type]
    (row,) = conversations.begin([Prompt(0, (1, 2), "19", "openai/gsm8k", "What?", info)], [100], temperature=1.0)
    conversations.finish([row])
    return row, engines.said[0]


def spoken(tokenizer: Any, row: Trajectory) -> list[str]:
    """What the tools and users said, up to the next turn of the policy."""
    pieces: list[list[int]] = []
    for place, (token, own) in enumerate(zip(row.token_ids, row.mask, strict=True)):
        if not own:
            if row.mask[place - 1]:
                pieces.append([])
            pieces[-1].append(token)
    return [tokenizer.decode(piece) for piece in pieces]


def test_tools_answer_and_the_policys_tokens_stay_as_they_were_sampled(tokenizer: Any, tmp_path: Path) -> None:
    row, said = converse(tokenizer, settings(tmp_path, GSM8K), [check("18"), check("19"), "#### 19"])
    assert spoken(tokenizer, row) == [
        "<|tool|>Current parsed answer='18' reward=0.0<|assistant|>",
        "<|tool|>Current parsed answer='19' reward=1.0<|assistant|>",
    ]
    assert row.sampled == [token for turn in said for token in turn]
    assert row.log_probs == [-0.5 if own else 0.0 for own in row.mask]
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


def test_a_call_that_cannot_be_read_is_no_call(tokenizer: Any, tmp_path: Path) -> None:
    row, _ = converse(tokenizer, settings(tmp_path, GSM8K), ["<tool_call>{name: x}</tool_call>"])
    assert (row.turns, all(row.mask)) == (1, True)


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


JUDGE = {"name": "judge", "class_name": "verl.interactions.gsm8k_interaction.Gsm8kInteraction", "config": {}}


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


def test_tools_are_in_the_prompts_of_the_rows_that_use_them(tokenizer: Any, tmp_path: Path) -> None:
    config = settings(tmp_path, GSM8K, {**GSM8K, "tool_schema": schema("other")}, agent="auto")
    rows = [
        {"agent_name": "tool_agent", "extra_info": {"tool_selection": None}},
        {"agent_name": "tool_agent", "extra_info": {"tool_selection": ["other"]}},
        {"agent_name": "single_turn_agent", "extra_info": {"tool_selection": None}},
    ]
    file = write(tmp_path, rows)
    data = config.data.model_copy(update={"max_prompt_length": 200})
    dataset = PromptDataset([file], tokenizer, data)
    starts = [tokenizer.decode(dataset[row].token_ids).split("<|user|>")[0] for row in range(3)]
    assert starts == ["[calc_gsm8k_reward][other]", "[other]", ""]
    check_agents(config, dataset)
    engines = FakeEngines(tokenizer, ["a"])
    conversations = Conversations(config, engines, tokenizer)  # type: ignore[arg-type]
    begun = conversations.begin([dataset[row] for row in range(3)], [1, 2, 3], temperature=1.0)
    assert [row.environment is not None for row in begun] == [True, True, False]


def write(directory: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    fixed = {"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": "What?"}]}
    truth = {"reward_model": {"ground_truth": "19"}}
    pq.write_table(pa.Table.from_pylist([{**fixed, **truth, **row} for row in rows]), directory / "rows.parquet")
    return directory / "rows.parquet"


def test_tools_that_no_row_would_use_are_refused(tokenizer: Any, tmp_path: Path) -> None:
    config = settings(tmp_path, GSM8K, agent="auto")
    data = config.data.model_copy(update={"max_prompt_length": 200})
    with pytest.raises(ConfigError, match="no row uses the tools"):
        check_agents(config, PromptDataset([write(tmp_path, [{}])], tokenizer, data))
    with pytest.raises(ConfigError, match="rows name the agent 'mine'"):
        check_agents(config, PromptDataset([write(tmp_path, [{"agent_name": "mine"}])], tokenizer, data))
    with_users = settings(tmp_path, GSM8K, users=[JUDGE])
    with pytest.raises(DataError, match="names the user None"):
        check_agents(with_users, PromptDataset([write(tmp_path, [{}])], tokenizer, data))


class Rewards:
    """Keeps what the reward would be computed from."""

    def __init__(self) -> None:
        self.asked: list[Answer] = []

    def __len__(self) -> int:
        return 1

    def call_each(self, tasks: Any, _timeout: float) -> list[list[Scored]]:
        (asked,) = [task.arguments[0] for task in tasks]
        self.asked += asked
        return [[Scored(1.0) for _ in asked]]


@pytest.mark.parametrize("text", ["policy", "conversation"])
def test_rewards_see_the_conversation_as_in_verl(tokenizer: Any, tmp_path: Path, text: str) -> None:
    config = settings(tmp_path, GSM8K).model_copy(
        update={"reward": Config.model_validate({"reward": {"text": text}}).reward}
    )
    row, _ = converse(tokenizer, config, [check("19"), "#### 19"])
    rewards, nothing = Rewards(), [None]
    data = RunData(tokenizer, nothing, nothing, PromptSampler(4, 4, shuffle=False, seed=0))  # type: ignore[arg-type]
    collector = Collector(config, None, rewards, data)  # type: ignore[arg-type]
    prompts = [Prompt(0, (1, 2), "19", "openai/gsm8k", "What?", {"index": 7})]
    scored = collector.score(prompts, [row])
    (answer,) = rewards.asked
    assert ("Current parsed" in answer.response) == (text == "conversation")
    assert answer.extra_info == {"index": 7, "num_turns": 4, "tool_rewards": [0.0], "turn_scores": []}
    metrics = collector.summarized(prompts * 4, [row] * 4, scored * 4).metrics
    assert (metrics["rollout/turns"], metrics["rollout/tool_calls"], metrics["rollout/failed_tool_calls"]) == (2, 1, 0)
    collector.close()


def test_formats_of_calls() -> None:
    assert [(c.name, json.loads(c.arguments)) for c in hermes.parse(f"so {call('a', x=1)} and {call('b')}<|end|>")] == [
        ("a", {"x": 1}),
        ("b", {}),
    ]
    text = '<|python_tag|>{"name": "a", "parameters": {"x": "{;}"}}; {"name": "b", "parameters": {}}<|eot_id|>'
    assert [(c.name, json.loads(c.arguments)) for c in llama3_json.parse(text)] == [("a", {"x": "{;}"}), ("b", {})]
    assert llama3_json.parse("I think {this}") == llama3_json.parse('{"name": "a"}') == []


def made(kind: type, name: str, **config: Any) -> Any:
    return kind(config, OpenAIFunctionToolSchema.model_validate(schema(name, "code")))


def run(tool: Any, **parameters: Any) -> str:
    response, _, _ = wait_for(tool.execute("1", parameters))
    return str(response.text)


def test_programs_run_in_the_sandbox_and_their_errors_are_shown() -> None:
    tool = made(CodeInterpreter, "code", default_timeout=2)
    assert run(tool, code="import math\nprint(math.factorial(5))") == "120\n"
    failed = run(tool, code="print('before')\nx = 1\nx / 0")
    assert failed.startswith('before\nTraceback (most recent call last):\n  File "solution.py", line 3')
    assert failed.endswith("ZeroDivisionError: division by zero\n")
    assert run(tool, code="import sys\nsys.exit('over')") == "over\n"
    assert run(tool, code="while True: pass", timeout=0.5) == "no stdout here"
    assert "Error" in run(tool, code="import socket\nsocket.socket()")


class Handler(BaseHTTPRequestHandler):
    """SandboxFusion and a retrieval server."""

    asked: list[dict[str, Any]]

    def do_POST(self) -> None:
        job = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(job)
        body = json.dumps(self.fusion(job) if self.path == "/run_code" else self.found(job)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def fusion(self, job: dict[str, Any]) -> dict[str, Any]:
        how = {"slow": "TimeLimitExceeded"}.get(job["code"], "Finished")
        code = 0 if job["code"] == "fine" else 1
        result = {"status": how, "return_code": code, "stdout": "out\n", "stderr": "" if code == 0 else "err\n"}
        return {"status": "Success" if code == 0 else "Failed", "compile_result": None, "run_result": result}

    def found(self, job: dict[str, Any]) -> dict[str, Any]:
        documents = [{"document": {"contents": f"{query}\nAbout {query}."}, "score": 1.0} for query in job["queries"]]
        return {"result": [documents[: job["topk"]] for _ in job["queries"]]}

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Handler.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_programs_run_on_a_sandbox_fusion_server(url: str) -> None:
    tool = made(CodeInterpreter, "code", sandbox_fusion_url=f"{url}/run_code", memory_limit_mb=256)
    assert [run(tool, code=code) for code in ("fine", "broken", "slow")] == ["out\n", "out\nerr\n", "no stdout here"]
    job = Handler.asked[0]
    assert (job["language"], job["run_timeout"], job["memory_limit_MB"], job["stdin"]) == ("python", 30, 256, None)


def test_search_asks_the_retrieval_server(url: str) -> None:
    tool = made(Search, "search", retrieval_service_url=f"{url}/retrieve", topk=1)
    found = json.loads(run(tool, query_list=["cats", "dogs"]))["result"]
    assert found == "Doc 1 (Title: cats)\nAbout cats.\n---\nDoc 1 (Title: cats)\nAbout cats."
    assert Handler.asked == [{"queries": ["cats", "dogs"], "topk": 1, "return_scores": True}]


def test_thoughts_of_earlier_turns_stay_as_they_were_sampled(tokenizer: Any) -> None:
    """A template like Qwen3's: it writes an empty thought into the last turn only."""
    template = TEMPLATE.replace(
        "{{ '<|' + message.role + '|>' + message.content }}",
        "{{ '<|' + message.role + '|>' }}"
        "{% if message.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ message.content }}",
    )
    own = use_chat_template(build_tokenizer(["19"]), DataConfig(chat_template=template))
    tokens = MessageTokens(own, DataConfig())([{"role": "tool", "content": "19"}])
    assert own.decode(tokens) == "<|tool|>19<|assistant|>"
