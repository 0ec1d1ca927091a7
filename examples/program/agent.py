"""An agent as `rollout.agent=program` starts it, once per trajectory: any language and any OpenAI client will do.

It asks the policy its question, asks once more if the answer has no `####`, and ends. The run's reward scores what the
policy said; a last line {"score": NUMBER} would be the reward instead.
"""

import json
import os
import sys
import urllib.request


def ask(messages: list[dict[str, str]]) -> dict[str, str]:
    """The policy's next message."""
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages}
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    address = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    request = urllib.request.Request(address, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as reply:
        message: dict[str, str] = json.load(reply)["choices"][0]["message"]
    return message


def main() -> None:
    messages = json.load(sys.stdin)["messages"]
    answer = ask(messages)
    if "####" not in answer["content"]:
        ask([*messages, answer, {"role": "user", "content": "Write #### and the answer."}])


if __name__ == "__main__":
    main()
