"""Calls as Qwen and Hermes models write them: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

import re

from trainer.experience.call_format import CallFormat, ToolCall, call_from_json

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def parse(text: str) -> list[ToolCall]:
    calls = [call_from_json(part) for part in _CALL.findall(text)]
    return [call for call in calls if call is not None]


ROW = CallFormat(name="hermes", parse=parse, opening="<tool_call>")
