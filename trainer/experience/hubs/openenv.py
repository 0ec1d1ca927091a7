"""Environments of OpenEnv: `openenv:URL` is a server, reached over its HTTP and WebSocket interfaces.

Source: https://meta-pytorch.org/OpenEnv. The turn of the policy becomes the action: the call of a tool where the server
offers tools, its text in the action's field otherwise. Rewards of all steps are summed.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.experience.hub import HubEnvironment, HubRow, Outcome, Policy, Task, UnusableEnvironmentError

_OF_TOOLS = ("Action", "CallToolAction", "ListToolsAction")  # titles of the actions of servers that offer tools
_BESIDE = ("done", "reward", "metadata")  # fields of every observation
_SECONDS = 30.0  # to answer about the schema
Message = dict[str, Any]


class OpenEnvEnvironment:
    """A server's environment. Row N is the episode with the seed N; validation has the seeds after those of training.

    `action` and `observation` name the fields that hold the policy's text and what it reads; without them, the only
    required field, and the whole observation as JSON unless it has a single field. `reset` goes to every reset;
    `system` is the first message.
    """

    def __init__(
        self,
        url: str,
        episodes: int = 1024,
        validation_episodes: int = 64,
        action: str | None = None,
        observation: str | None = None,
        reset: Mapping[str, Any] | None = None,
        system: str | None = None,
    ) -> None:
        self._url, self._reset, self._system, self._observation = url, dict(reset or {}), system, observation
        self._seeds = {"train": range(episodes), "validation": range(episodes, episodes + validation_episodes)}
        schema = _schema(url)
        self._has_tools = action is None and schema.get("title") in _OF_TOOLS
        self._action = None if self._has_tools else action or _only_field(schema)
        if action is not None and action not in schema.get("properties", {}):
            raise UnusableEnvironmentError(
                f"its action has no field {action}", f"fields: {', '.join(schema.get('properties', {}))}"
            )

    def tasks(self, split: str) -> Sequence[Task]:
        return [Task([{"role": "user", "content": f"episode {seed}"}]) for seed in self._seeds[split]]

    async def play(self, split: str, number: int, policy: Policy) -> Outcome:
        from openenv import GenericEnvClient

        total, steps = 0.0, 0
        async with GenericEnvClient(base_url=self._url) as server:
            result = await server.reset(seed=self._seeds[split][number], **self._reset)
            tools = await _tools(server) if self._has_tools else []
            messages: list[Message] = [{"role": "system", "content": self._system}] if self._system else []
            messages.append({"role": "user", "content": self._shown(result.observation)})
            while not result.done:
                if (message := await policy.reply(messages, tools)) is None:
                    break
                messages.append(message)
                actions = self._actions(message)
                if not actions:
                    break  # a turn without a call, where the server offers tools
                for action, answers in actions:
                    result = await server.step(action)
                    total, steps = total + (result.reward or 0.0), steps + 1
                    messages.append({**answers, "content": self._shown(result.observation)})
                    if result.done:
                        break
        return Outcome(total, {"steps": float(steps), "finished": float(result.done)})

    def _actions(self, message: Message) -> list[tuple[dict[str, Any], Message]]:
        """The actions of a turn, each with the head of the message that answers it."""
        if self._action is not None:
            return [({self._action: message.get("content") or ""}, {"role": "user"})]
        actions = []
        for call in message.get("tool_calls") or []:
            function = call["function"]
            action = {
                "type": "call_tool",
                "tool_name": function["name"],
                "arguments": json.loads(function["arguments"]),
            }
            actions.append((action, {"role": "tool", "tool_call_id": call["id"]}))
        return actions

    def _shown(self, observation: Mapping[str, Any]) -> str:
        """What the policy reads of an observation."""
        if self._observation is not None and self._observation in observation:
            return _text(observation[self._observation])
        seen = {name: value for name, value in observation.items() if name not in _BESIDE and value is not None}
        return _text(next(iter(seen.values())) if len(seen) == 1 else seen)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _schema(url: str) -> Mapping[str, Any]:
    """The JSON schema of the server's actions. Raises UnusableEnvironmentError if nothing answers."""
    import httpx

    try:
        answer = httpx.get(f"{url.rstrip('/')}/schema", timeout=_SECONDS)
        answer.raise_for_status()
        schema: Mapping[str, Any] = answer.json()["action"]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError) as error:
        raise UnusableEnvironmentError(
            f"no OpenEnv server answers at {url}: {type(error).__name__}: {error}",
            "start it first, and name it as in openenv:http://HOST:8000",
        ) from error
    return schema


def _only_field(schema: Mapping[str, Any]) -> str:
    required = schema.get("required", [])
    if len(required) != 1:
        names = ", ".join(name for name in schema.get("properties", {}) if name not in _BESIDE)
        raise UnusableEnvironmentError(
            f"its action has {len(required)} required fields",
            f"set rollout.environment.arguments.action to the field for the policy's text: {names}",
        )
    return str(required[0])


async def _tools(server: Any) -> list[dict[str, Any]]:
    """The server's tools in OpenAI's format."""
    listed = await server.step({"type": "list_tools"})
    return [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool["description"],
                "parameters": tool.get("input_schema")
                or tool.get("inputSchema")
                or {"type": "object", "properties": {}},
            },
        }
        for tool in listed.observation["tools"]
    ]


def _open(name: str, **arguments: Any) -> HubEnvironment:
    import openenv  # noqa: F401 - refused here without it

    return OpenEnvEnvironment(name, **arguments)


ROW = HubRow(name="openenv", package="openenv>=0.10", open=_open)
