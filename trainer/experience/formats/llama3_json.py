"""Calls as Llama 3 writes them: a turn that is JSON, {"name": ..., "parameters": {...}}; several are joined by `;`."""

import json
import re

from trainer.experience.call_format import CallFormat, ToolCall, call_from_json

_SPECIAL = re.compile(r"<\|[a-z_]+\|>")


def parse(text: str) -> list[ToolCall]:
    text = _SPECIAL.sub("", text).strip()
    calls: list[ToolCall] = []
    while text.startswith("{"):
        try:
            _, end = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError):
            break
        call = call_from_json(text[:end], ("parameters", "arguments"))
        if call is not None:
            calls.append(call)
        text = text[end:].lstrip("; \n")
    return calls


ROW = CallFormat(name="llama3_json", parse=parse, opening="{")
