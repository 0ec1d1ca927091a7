"""Chat completions in OpenAI's format: requests read, replies written."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from uuid import uuid4

from trainer.data.formats.messages import text_messages
from trainer.data.formats.tools import checked_tools
from trainer.errors import DataError
from trainer.experience.call_format import ToolCall

# The run decides how the policy samples; a program's own wishes would train another policy.
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty", "logit_bias"),
    *("repetition_penalty", "min_tokens", "parallel_tool_calls", "reasoning_effort", "verbosity"),
)
_BOOKKEEPING = ("user", "metadata", "store", "service_tier", "stream_options", "prompt_cache_key", "safety_identifier")
_USED = ("messages", "model", "tools", "max_tokens", "max_completion_tokens", "stream")
_FIXED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "tool_choice": ("auto", "none"),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "stop": ([],),
    "response_format": ({"type": "text"},),
}


class BadRequestError(Exception):
    """A request that the policy cannot answer."""

    def __init__(self, message: str, code: str = "invalid_request", status: int = HTTPStatus.BAD_REQUEST) -> None:
        super().__init__(message)
        self.code, self.status = code, status


@dataclass(frozen=True)
class ChatRequest:
    """A request for the policy's next turn. `messages` are as `for_template` writes them. `may_call`: calls of tools in
    the turn are calls, not text. `ignored` are the sampling parameters that the run decides itself."""

    messages: list[dict[str, Any]]
    tools: list[Any]
    may_call: bool = True
    max_tokens: int | None = None
    stream: bool = False
    model: str = ""
    ignored: tuple[str, ...] = ()

    def same_turn(self, other: "ChatRequest") -> bool:
        """Whether both ask for the same turn."""
        return (self.messages, self.tools) == (other.messages, other.tools)


@dataclass(frozen=True)
class ChatReply:
    """A turn of the policy. `content` is None where the turn is nothing but calls of tools."""

    content: str | None
    calls: Sequence[ToolCall]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int

    def message(self) -> dict[str, Any]:
        """The turn as a message."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": f"call_{number}_{self.prompt_tokens}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for number, call in enumerate(self.calls)
            ]
        return message


def read_request(body: bytes) -> ChatRequest:
    """The request. Raises BadRequestError for anything that would be dropped otherwise."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the body is no JSON: {error}") from error
    if not isinstance(given, dict) or not given.get("messages"):
        raise BadRequestError("the body has no messages")
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        if name in _FIXED and value not in _FIXED[name]:
            raise BadRequestError(f"{name}={json.dumps(value)} is not supported")
        if name not in (*_USED, *_FIXED, *_SAMPLING, *_BOOKKEEPING):
            raise BadRequestError(f"{name} is not supported")
    try:
        messages = text_messages("the request", "messages", given["messages"], "send text")
        tools = checked_tools("the request", given["tools"]) if given.get("tools") else []
    except (DataError, RecursionError) as error:
        raise BadRequestError(str(error)) from error
    for number, message in enumerate(messages):
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list) or not all(map(_is_call, calls)):
            raise BadRequestError(f"message {number}: tool_calls is not a list of calls with function and name")
    most = given.get("max_completion_tokens", given.get("max_tokens"))
    if most is not None and (not isinstance(most, int) or most < 1):
        raise BadRequestError(f"max_tokens={most} is no positive number")
    return ChatRequest(
        [for_template(message) for message in messages],
        tools,
        may_call=given.get("tool_choice") != "none",
        max_tokens=most,
        stream=bool(given.get("stream")),
        model=str(given.get("model", "")),
        ignored=tuple(name for name in _SAMPLING if name in given),
    )


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as chat templates know it: the arguments of its calls as mappings, `system` instead of `developer`.

    OpenAI's arguments are JSON in a text, which a template would write as JSON once more.
    """
    role = "system" if message["role"] == "developer" else message["role"]
    if not (calls := message.get("tool_calls")):
        return {**message, "role": role}
    functions = [call["function"] for call in calls]
    parsed = [{**function, "arguments": _parsed(function.get("arguments", {}))} for function in functions]
    calls = [{**call, "function": function} for call, function in zip(calls, parsed, strict=True)]
    return {**message, "role": role, "tool_calls": calls}


def _parsed(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments


def write_reply(reply: ChatReply, model: str) -> dict[str, Any]:
    """The body of an answer."""
    choice = {"index": 0, "message": reply.message(), "finish_reason": reply.finish_reason, "logprobs": None}
    return {**_head("chat.completion", model), "choices": [choice], "usage": _usage(reply)}


def write_stream(reply: ChatReply, model: str) -> bytes:
    """The body of a streamed answer: the whole turn in one event, then its end."""
    head = _head("chat.completion.chunk", model)
    message = reply.message()
    for number, call in enumerate(message.get("tool_calls", [])):
        call["index"] = number
    turn = {**head, "choices": [{"index": 0, "delta": message, "finish_reason": None}]}
    end = {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": reply.finish_reason}], "usage": _usage(reply)}
    events = [json.dumps(turn), json.dumps(end), "[DONE]"]
    return "".join(f"data: {event}\n\n" for event in events).encode()


def write_error(error: BadRequestError) -> dict[str, Any]:
    """The body of a refusal."""
    return {"error": {"message": str(error), "type": "invalid_request_error", "param": None, "code": error.code}}


def _head(kind: str, model: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def _usage(reply: ChatReply) -> Mapping[str, int]:
    total = reply.prompt_tokens + reply.completion_tokens
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": total,
    }
