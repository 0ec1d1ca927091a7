"""Resources servers of NeMo-Gym: `nemo_gym:URL` is a server that runs, reached over HTTP.

Source: https://docs.nvidia.com/nemo/gym. A conversation is `POST /seed_session`, a `POST /TOOL` for each call, and
`POST /verify` with what the policy said in the format of OpenAI's Responses; cookies hold the session. A turn without
a call ends it.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.experience.hub import SPLITS, HubEnvironment, HubRow, Outcome, Policy, Task, UnusableEnvironmentError

Message = dict[str, Any]


class NemoGymEnvironment:
    """A server with the rows of two JSON Lines files, as NeMo-Gym writes them: `responses_create_params` beside what
    the server reads to verify."""

    def __init__(self, url: str, train: str, validation: str) -> None:
        import httpx

        self._url = url.rstrip("/")
        self._rows = {split: _read(Path(file)) for split, file in zip(SPLITS, (train, validation), strict=True)}
        try:
            httpx.get(self._url, timeout=30.0)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UnusableEnvironmentError(
                f"no NeMo-Gym server answers at {url}: {type(error).__name__}: {error}",
                "start it first, and name it as in nemo_gym:http://HOST:8000",
            ) from error

    def tasks(self, split: str) -> Sequence[Task]:
        return [Task(_messages(row), row.get("expected_answer") or "") for row in self._rows[split]]

    async def play(self, split: str, number: int, policy: Policy) -> Outcome:
        import httpx

        row = self._rows[split][number]
        output: list[dict[str, Any]] = []
        messages, tools = _messages(row), _tools(row)
        async with httpx.AsyncClient(base_url=self._url, timeout=None) as server:
            if (await _post(server, "seed_session", row)).get("mcp"):
                raise RuntimeError("the server offers its tools over MCP, and only tools over HTTP are supported")
            calls: list[Any] = [None]
            while calls:
                if (message := await policy.reply(messages, tools)) is None:
                    break
                messages.append(message)
                calls = message.get("tool_calls") or []
                if text := message.get("content"):
                    output.append(_said(text, len(output)))
                for call in calls:
                    function = call["function"]
                    answer = await server.post(function["name"], json=json.loads(function["arguments"]))
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": answer.text})
                    output.append({"type": "function_call", "call_id": call["id"], **function})
                    output.append({"type": "function_call_output", "call_id": call["id"], "output": answer.text})
            verified = await _post(server, "verify", {**row, "response": _response(row, output)})
        numbers = {name: float(value) for name, value in verified.items() if isinstance(value, bool | int | float)}
        return Outcome(numbers.pop("reward"), numbers)


async def _post(server: Any, path: str, body: Any) -> dict[str, Any]:
    answer = await server.post(path, json=body)
    answer.raise_for_status()
    content: dict[str, Any] = answer.json() or {}
    return content


def _read(file: Path) -> list[dict[str, Any]]:
    """The rows of a file. Raises UnusableEnvironmentError."""
    try:
        rows = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
        for row in rows:
            _messages(row)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnusableEnvironmentError(
            f"{file} holds no rows of NeMo-Gym: {type(error).__name__}: {error}",
            "set rollout.environment.arguments.train and .validation to its JSON Lines",
        ) from error
    return rows


def _messages(row: dict[str, Any]) -> list[Message]:
    """The row's prompt as messages of a chat."""
    given = row["responses_create_params"]["input"]
    return (
        [{"role": "user", "content": given}]
        if isinstance(given, str)
        else [{"role": message["role"], "content": message["content"]} for message in given]
    )


def _tools(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The row's tools in the format of chat completions."""
    tools = row["responses_create_params"].get("tools") or []
    names = ("name", "description", "parameters")
    return [{"type": "function", "function": {name: tool[name] for name in names if name in tool}} for tool in tools]


def _said(text: str, number: int) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"id": f"msg_{number}", "type": "message", "role": "assistant", "status": "completed", "content": content}


def _response(row: dict[str, Any], output: list[dict[str, Any]]) -> dict[str, Any]:
    """OpenAI's response object of a whole conversation."""
    return {
        "id": "resp_0",
        "created_at": time.time(),
        "model": "policy",
        "object": "response",
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": row["responses_create_params"].get("tools") or [],
        "status": "completed",
    }


def _open(name: str, **arguments: Any) -> HubEnvironment:
    return NemoGymEnvironment(name, **arguments)


ROW = HubRow(name="nemo_gym", package="httpx openai", open=_open)
