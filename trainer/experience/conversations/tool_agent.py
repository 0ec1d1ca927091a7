"""Runs the tools that the policy calls, and lets a simulated user answer turns without a call."""

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from trainer.config.sections.rollout import ToolsConfig
from trainer.data.dataset import Prompt
from trainer.data.formats.tools import selected, without_nulls
from trainer.errors import DataError
from trainer.experience.call_format import CallFormat, ToolCall
from trainer.experience.conversations.calls import wait_for
from trainer.experience.environment import Observation, Turn
from trainer.experience.tool import AgentData
from trainer.rewards.sandbox.programs import SandboxError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass(frozen=True)
class Toolbox:
    """What all conversations with tools share. Tools and users are objects with the interface of `Tool` and
    `Interaction`; `schemas` are in the order of the tools file. `decode` keeps special tokens. What takes longer than
    `timeout` seconds is cancelled."""

    tools: Mapping[str, Any]
    schemas: Sequence[Any]
    users: Mapping[str, Any]
    format: CallFormat
    settings: ToolsConfig
    max_turns: int | None
    decode: Callable[[Sequence[int]], str]
    timeout: float


class ToolAgent:
    """A conversation in which each turn of the policy may call tools; a turn without a call ends it, or goes to the
    simulated user that the row names. Failures of tools are told to the policy and counted; a sandbox that does not run
    programs fails the conversation."""

    def __init__(self, toolbox: Toolbox) -> None:
        self._toolbox = toolbox
        self._tools = toolbox.tools
        self._user: Any = None
        self._user_kwargs: dict[str, Any] = {}
        self._data = AgentData([], {})
        self.calls = self.failed_calls = 0

    def reset(self, prompt: Prompt, seed: int) -> None:
        """Starts a conversation with the row's own tools, their arguments, and its user."""
        del seed
        info = without_nulls(dict(prompt.extra_info))
        self._data = AgentData([dict(message) for message in prompt.chat], info.get("tools_kwargs") or {})
        if info.get("tool_selection"):
            names = [schema["function"]["name"] for schema in selected(self._toolbox.schemas, info["tool_selection"])]
            self._tools = {name: self._toolbox.tools[name] for name in names}
        if self._toolbox.users:
            self._user_kwargs = user_kwargs(prompt, self._toolbox.users)
            self._user = self._toolbox.users[self._user_kwargs["name"]]
            self._wait_for(self._user.start_interaction(self._data.request_id, **self._user_kwargs))

    def step(self, turn: Turn) -> Observation:
        """What the tools or the user say; the end of the conversation if nobody answers."""
        self._data.assistant_turns += 1
        self._data.response_ids = list(turn.token_ids)
        if self._data.assistant_turns == self._toolbox.max_turns:
            return Observation(done=True)  # nobody would read what tools say
        calls = self._toolbox.format.parse(self._toolbox.decode(turn.token_ids))
        calls = calls[: self._toolbox.settings.max_parallel_calls]
        self._data.messages.append({"role": "assistant", "content": turn.text})
        if calls:
            return self._wait_for(self._call_all(calls))
        return Observation(done=True) if self._user is None else self._wait_for(self._ask_user())

    def _wait_for(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return wait_for(coroutine, self._toolbox.timeout)

    def facts(self) -> dict[str, Any]:
        """What a reward function gets of this conversation, in its `extra_info`."""
        return {"tool_rewards": list(self._data.tool_rewards), "turn_scores": list(self._data.turn_scores)}

    async def _call_all(self, calls: Sequence[ToolCall]) -> Observation:
        answers = await asyncio.gather(*(self._call(call) for call in calls))
        messages = [{"role": "tool", "content": text} for text, _ in answers]
        self._data.tool_rewards += [reward for _, reward in answers if reward is not None]
        self._data.messages += messages
        self._data.user_turns += 1
        return Observation(messages)

    async def _call(self, call: ToolCall) -> tuple[str, float | None]:
        """What the tool says, and the reward of the call."""
        self.calls += 1
        if call.name not in self._tools:
            return self._failed(f"Unknown function {call.name!r}. Available tools: {list(self._tools)}")
        try:
            parameters = json.loads(call.arguments)
        except ValueError as error:
            return self._failed(f"Invalid JSON in arguments for {call.name!r}: {error}")
        try:
            response, reward = await self._execute(call.name, parameters)
            media, text = response.image or response.video, str(response.text or "")
            text.encode()  # a lone surrogate would cost the conversation
        except SandboxError:
            raise  # the policy is not to blame for it
        except Exception as error:  # noqa: BLE001 - the user's tool may raise and return anything
            return self._failed(f"Error executing tool {call.name!r}: {error}")
        if media:
            return self._failed(f"Error executing tool {call.name!r}: it returned images, and there is no vision")
        return self._shortened(text), reward

    async def _execute(self, name: str, parameters: Any) -> tuple[Any, float | None]:
        """Response and reward of a call, which has an instance of the tool for itself."""
        tool, kwargs = self._tools[name], self._data.tools_kwargs.get(name) or {}
        instance_id, _ = await tool.create(create_kwargs=kwargs.get("create_kwargs") or {})
        try:
            response, reward, _ = await tool.execute(instance_id, parameters, agent_data=self._data)
        finally:
            await tool.release(instance_id)
        return response, reward

    def _failed(self, text: str) -> tuple[str, float]:
        self.failed_calls += 1
        logger.debug("%s", text)
        return self._shortened(text), 0.0

    def _shortened(self, text: str) -> str:
        limit, side = self._toolbox.settings.max_response_length, self._toolbox.settings.truncate_side
        if len(text) <= limit:
            return text
        if side == "left":
            return f"(truncated)...{text[-limit:]}"
        if side == "right":
            return f"{text[:limit]}...(truncated)"
        half = limit // 2
        return f"{text[:half]}...(truncated)...{text[-half:]}"

    async def _ask_user(self) -> Observation:
        data = self._data
        ends, text, score, _ = await self._user.generate_response(
            data.request_id, list(data.messages), **self._user_kwargs
        )
        message = {"role": "user", "content": text}
        data.messages.append(message)
        data.user_turns += 1
        if score is not None:
            data.turn_scores.append(score)
        if ends:
            await self._user.finalize_interaction(data.request_id)
        return Observation([message], done=ends)


def user_kwargs(prompt: Prompt, users: Mapping[str, Any]) -> dict[str, Any]:
    """The row's `extra_info.interaction_kwargs`. Raises DataError if they name none of the users."""
    kwargs = without_nulls(dict(prompt.extra_info)).get("interaction_kwargs")
    name = kwargs.get("name") if isinstance(kwargs, dict) else None
    if name not in users:
        raise DataError(
            f"the prompt {prompt.question[:60]!r} names the user {name!r} in extra_info.interaction_kwargs.name",
            hint=f"users of rollout.interactions_file: {', '.join(users)}",
        )
    return dict(kwargs)
