"""What answers the policy: tools that wait and programs that do, a share of which fail."""

import argparse
import asyncio
import math
import random
import string
from typing import Any

from trainer.data.dataset import Prompt
from trainer.experience.call_format import ToolCall
from trainer.experience.tool import AgentData, Tool, ToolResponse

TURNS = 4
MEDIAN, SPREAD, SHORTEST, LONGEST = 2.0, 1.5, 0.1, 60.0  # seconds of a tool; SPREAD: deviation of the logarithm
BAD = ("raises", "hangs", "nonsense")

TOOLS = """
tools:
  - class_name: benchmarks.conversations.agents.WaitingTool
    tool_schema:
      type: function
      function: {name: wait, description: Waits., parameters: {type: object, properties: {}, required: []}}
"""
PROGRAM = """
import http.client, json, os, sys, time
task = json.load(sys.stdin)
host, _, path = os.environ["OPENAI_BASE_URL"].removeprefix("http://").partition("/")
connection = http.client.HTTPConnection(host)
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
messages, info = task["messages"], task["extra_info"]
for number, (seconds, answer) in enumerate([*zip(info["seconds"], info["answers"]), (0, "")]):
    if info["bad"] == "raises" and number == 1:
        raise RuntimeError("the agent is broken")
    if info["bad"] == "hangs" and number == 1:
        time.sleep(3600)
    connection.request("POST", f"/{path}/chat/completions", json.dumps({"messages": messages}), headers)
    reply = connection.getresponse()
    body = json.load(reply)
    if reply.status != 200:
        sys.exit(body["error"]["message"])
    messages += [body["choices"][0]["message"], {"role": "user", "content": answer}]
    time.sleep(seconds)
print(json.dumps({"score": "much" if info["bad"] == "nonsense" else 1.0}))
"""


class WaitingTool(Tool):
    """Waits for as long as the row says, and then answers what the row says."""

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, None, None]:
        del instance_id, parameters
        data: AgentData = kwargs["agent_data"]
        info, turn = data.tools_kwargs["wait"], data.assistant_turns - 1
        if turn == 0 and info["bad"]:
            if info["bad"] == "hangs":
                await asyncio.sleep(3600)
            return 1 / 0 if info["bad"] == "raises" else "nonsense", None, None  # type: ignore[return-value]
        await asyncio.sleep(info["seconds"][turn])
        return ToolResponse(text=info["answers"][turn]), None, None


def always_calls(_text: str) -> list[ToolCall]:
    return [ToolCall("wait", "{}")]


def made_prompts(options: argparse.Namespace, tokenizer: Any) -> list[Prompt]:
    """A prompt for each conversation: random letters, and what its tools do."""
    generator = random.Random(0)
    prompts = []
    for number in range(options.conversations):
        question = "".join(generator.choices(string.ascii_letters, k=options.prompt))
        drawn = [generator.lognormvariate(math.log(MEDIAN), SPREAD) for _ in range(TURNS - 1)]
        info = {
            "seconds": [options.time_scale * min(max(seconds, SHORTEST), LONGEST) for seconds in drawn],
            "answers": ["".join(generator.choices(string.ascii_letters, k=options.answer)) for _ in drawn],
            "bad": BAD[number % len(BAD)] if generator.random() < options.bad else "",
        }
        messages = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        token_ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        extra = {**info, "tools_kwargs": {"wait": info}}
        prompts.append(Prompt(number, token_ids, "", "random", question, extra, messages))
    return prompts
