"""The code interpreter and the search tool, with a real sandbox and a real server."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.serving import serving
from tests.trainer.experience.conversations.scripted_policy import call, converse, schema, settings
from trainer.data.formats.tool_schema import OpenAIFunctionToolSchema
from trainer.experience.conversations.calls import wait_for
from trainer.experience.tools.code import CodeInterpreter
from trainer.experience.tools.search import Search


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
        body = json.dumps(self.fusion(job) if self.path == "/run_code" else self.pages(job)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def fusion(self, job: dict[str, Any]) -> dict[str, Any]:
        how = {"slow": "TimeLimitExceeded"}.get(job["code"], "Finished")
        code = 0 if job["code"] == "fine" else 1
        result = {"status": how, "return_code": code, "stdout": "out\n", "stderr": "" if code == 0 else "err\n"}
        return {"status": "Success" if code == 0 else "Failed", "compile_result": None, "run_result": result}

    def pages(self, job: dict[str, Any]) -> dict[str, Any]:
        documents = [{"document": {"contents": f"{query}\nAbout {query}."}, "score": 1.0} for query in job["queries"]]
        return {"result": [documents[: job["topk"]] for _ in job["queries"]]}

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Handler.asked = []
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server:
        yield f"http://127.0.0.1:{server.server_port}"


def test_programs_run_on_a_sandbox_fusion_server(url: str) -> None:
    tool = made(CodeInterpreter, "code", sandbox_fusion_url=f"{url}/run_code", memory_limit_mb=256)
    assert [run(tool, code=code) for code in ("fine", "broken", "slow")] == ["out\n", "out\nerr\n", "no stdout here"]
    job = Handler.asked[0]
    assert (job["language"], job["run_timeout"], job["memory_limit_MB"], job["stdin"]) == ("python", 30, 256, None)


def test_a_call_may_shorten_its_time_but_not_lengthen_it(url: str) -> None:
    tool = made(CodeInterpreter, "code", sandbox_fusion_url=f"{url}/run_code", default_timeout=2)
    for asked in (0.5, 1000, float("inf"), -1, "1"):
        run(tool, code="fine", timeout=asked)
    assert [job["run_timeout"] for job in Handler.asked] == [0.5, 2, 2, 2, 1]


def test_search_asks_the_retrieval_server(url: str) -> None:
    tool = made(Search, "search", retrieval_service_url=f"{url}/retrieve", topk=1)
    result = json.loads(run(tool, query_list=["cats", "dogs"]))["result"]
    assert result == "Doc 1 (Title: cats)\nAbout cats.\n---\nDoc 1 (Title: cats)\nAbout cats."
    assert Handler.asked == [{"queries": ["cats", "dogs"], "topk": 1, "return_scores": True}]


def test_a_sandbox_that_runs_no_programs_fails_the_conversation(tokenizer: Any, tmp_path: Path) -> None:
    tool = {
        "class_name": "code",
        "config": {"sandbox_fusion_url": "http://127.0.0.1:1/run_code"},
        "tool_schema": schema("python", "code"),
    }
    row, said = converse(tokenizer, settings(tmp_path, tool), [call("python", code="1"), call("python", code="2"), "x"])
    assert row.scored is not None
    assert (row.scored.cause, row.retried, len(said)) == ("environment_error", ("environment_error",), 2)
    assert "UnreachableSandboxError: the sandbox at http://127.0.0.1:1/run_code does not answer" in row.scored.failure
