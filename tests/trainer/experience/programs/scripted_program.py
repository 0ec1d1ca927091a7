"""What programs of tests begin with, and a script in the place of the policy."""

from collections.abc import Sequence
from typing import Any

from trainer.rollout.sampling import Response, SamplingRequest

TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}{{ '<|' + message.role + '|>' + (message.content or '') }}"
    "{% if message.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CLIENT = """
import json, os, sys, time, urllib.error, urllib.request

def post(body, **headers):
    return post_text(json.dumps(body), **headers)

def post_text(body, **headers):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], **headers}
    address = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(address, body.encode(), headers)
    try:
        with urllib.request.urlopen(request) as reply:
            return reply.read()
    except urllib.error.HTTPError as error:
        print(json.load(error)["error"]["message"], file=sys.stderr)
        raise SystemExit(3)

def ask(messages, headers={}, **more):
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, **more}
    return json.loads(post(body, **headers))["choices"][0]

messages = json.load(sys.stdin)["messages"]
"""


class FakeEngines:
    """Answers the last message of a prompt with the line that belongs to it, a piece at a time."""

    def __init__(self, tokenizer: Any, lines: dict[str, str]) -> None:
        self.version = 0
        self.in_flight = False
        self.asked: list[list[SamplingRequest]] = []
        self._tokenizer, self._lines = tokenizer, lines

    def generate(self, requests: Sequence[SamplingRequest], homes: Sequence[int] | None) -> list[Response]:
        assert homes is not None
        assert requests
        self.asked.append(list(requests))
        return [self._response(request) for request in requests]

    def _response(self, request: SamplingRequest) -> Response:
        """A prompt without the opening of a turn is a row's own, of three tokens."""
        opening = self._tokenizer.convert_tokens_to_ids("<|assistant|>")
        prompt = list(request.prompt)
        start = len(prompt) - prompt[::-1].index(opening) if opening in prompt else 3
        before = self._tokenizer.decode(prompt[:start]).removesuffix("<|assistant|>")
        line = next(line for last, line in self._lines.items() if before.endswith(last))
        words = self._tokenizer(line + "<|end|>")["input_ids"][len(prompt) - start :]
        taken = tuple(words[: request.max_tokens])
        return Response(taken, tuple(-0.5 for _ in taken), ended=len(taken) == len(words))
