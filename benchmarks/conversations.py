"""A thousand conversations whose tools take from 0.1 to 60 s: how busy the engine stays, and what it reads twice.

    python -m benchmarks.conversations tools
    python -m benchmarks.conversations programs --bad 0.1

The controller's own code (`Conversations`, with tools or with programs at the endpoint), and the trainer's vLLM engine
in a process of its own. The policy is random: its turns have random lengths, and every turn counts as a call of the
tool. Durations of tools are log-normal with a median of 2 s, clipped, and then multiplied by `--time-scale`. With
`--bad`, that share of the tools or programs raises, hangs, or returns nonsense. On a GPU: `--device cuda --shape 0.5B`.
"""

import argparse
import asyncio
import math
import multiprocessing
import os
import random
import string
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean
from typing import Any, Self

from benchmarks.gpu.common import SHAPES, Results, arguments, write_job
from trainer.config.tree import Config
from trainer.data.dataset import Prompt
from trainer.experience.call_format import ToolCall
from trainer.experience.conversations.sampler import Conversations
from trainer.experience.conversations.tool_agent import ToolAgent
from trainer.experience.conversations.trajectory import Trajectory
from trainer.experience.formats import hermes
from trainer.experience.programs.host import ProgramAgent
from trainer.experience.tool import AgentData, Tool, ToolResponse
from trainer.models.files import load_tokenizer
from trainer.rollout.end_tokens import end_token_ids
from trainer.rollout.sampling import Part, Response, SamplingRequest

TURNS = 4
MEDIAN, SPREAD, SHORTEST, LONGEST = 2.0, 1.5, 0.1, 60.0  # seconds of a tool; SPREAD: deviation of the logarithm
BAD = ("raises", "hangs", "nonsense")
SEEDS = 1_000_000  # between two conversations, so that a request's seed names its conversation

TOOLS = """
tools:
  - class_name: benchmarks.conversations.WaitingTool
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


@dataclass(frozen=True)
class Call:
    """A call of the engine: its begin and end, and how many sequences it decoded at each look."""

    begin: float
    end: float
    running: Sequence[int]


@dataclass
class Asked:
    """A request, the tokens sampled for it, and how many tokens of its prompt were cached."""

    request: SamplingRequest
    token_ids: list[int] = field(default_factory=list)
    cached: int = 0

    def add(self, response: Response) -> None:
        self.token_ids += response.token_ids
        self.cached += response.cached_tokens or 0


def serve(connection: Connection, config: Config, device: str, end_tokens: Sequence[int]) -> None:
    """The engine's process: answers (method, arguments) with (result, Call), after it has sent its block size."""
    from trainer.rollout.process_environment import engine_environment

    os.environ.update(engine_environment(enforce_eager=device == "cpu"))
    from trainer.rollout.backends.vllm import VllmEngine
    from trainer.rollout.occupancy import looking

    engine = VllmEngine(config, device, end_tokens)
    connection.send(engine._engine.llm_engine.vllm_config.cache_config.block_size)
    while True:
        method, arguments = connection.recv()
        begin = time.monotonic()
        with looking(engine.load) as loads:
            result = getattr(engine, method)(*arguments)
        connection.send((result, Call(begin, time.monotonic(), [load.running for load in loads])))


class Recorder:
    """The engine, as `Conversations` calls `Engines`. Records what it was asked and what it sampled."""

    version = 0
    in_flight = True

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._numbered: dict[int, Asked] = {}
        self.block: int = connection.recv()
        self.calls: list[Call] = []
        self.asked: list[Asked] = []

    def generate(self, requests: Sequence[SamplingRequest], homes: Any = None) -> list[Response]:
        del homes  # there is one engine
        responses: list[Response] = self._ask("generate", requests)
        for request, response in zip(requests, responses, strict=True):
            self.asked.append(Asked(request))
            self.asked[-1].add(response)
        return responses

    @property
    def under_way(self) -> set[int]:
        return set(self._numbered)

    def advance(self, new: Mapping[int, SamplingRequest], steps: int, homes: Any = None) -> dict[int, Part]:
        del homes
        for number, request in new.items():
            self._numbered[number] = Asked(request)
            self.asked.append(self._numbered[number])
        parts: dict[int, Part] = self._ask("advance", new, steps)
        for number, part in parts.items():
            self._numbered[number].add(part)
            if part.finished:
                del self._numbered[number]
        return parts

    def _ask(self, method: str, *asked: Any) -> Any:
        self._connection.send((method, asked))
        result, call = self._connection.recv()
        self.calls.append(call)
        return result

    def by_conversation(self) -> dict[int, list[Asked]]:
        found: dict[int, list[Asked]] = {}
        for one in self.asked:
            found.setdefault(one.request.seed // SEEDS, []).append(one)
        return found


@contextmanager
def open_engine(config: Config, device: str) -> Iterator[Recorder]:
    """The engine, ready; its process ends with the block."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    ends = end_token_ids(config.model.directory)
    process = context.Process(target=serve, args=(theirs, config, device, ends), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Recorder(ours)
    finally:
        process.kill()
        process.join()


def settings(options: argparse.Namespace) -> Config:
    rollout: dict[str, Any] = {
        "max_turns": TURNS,
        "max_num_seqs": options.max_num_seqs,
        "sleep": False,
        "environment_calls": options.answering,
        "segment_length": options.segment,
        "environment_timeout": LONGEST * options.time_scale + 30,
        "kv_cache_gib": options.kv_cache_gib,
    }
    data: dict[str, Any] = {"max_prompt_length": options.prompt + 64, "max_response_length": options.limit}
    if options.kind == "tools":
        data["tools_file"] = options.job / "tools.yaml"
        data["tools_file"].write_text(TOOLS)
        rollout["agent"] = "tools"
    else:
        program = options.job / "agent.py"
        program.write_text(PROGRAM)
        rollout["agent"] = "program"
        # -S: starts without site-packages, because this measures the trainer and not Python.
        command = [sys.executable, "-I", "-S", str(program)]
        rollout["program"] = {"command": command, "processes": options.answering}
    dtype = "float32" if options.device == "cpu" else "bfloat16"
    tree = {"model": {"path": options.job / "model", "dtype": dtype}, "rollout": rollout, "data": data}
    return Config.model_validate(tree)


def made_prompts(options: argparse.Namespace, tokenizer: Any) -> list[Prompt]:
    """A prompt for each conversation: random letters, and what its tools do."""
    generator = random.Random(0)
    prompts = []
    for number in range(options.conversations):
        question = "".join(generator.choices(string.ascii_letters, k=options.prompt))
        drawn = [generator.lognormvariate(math.log(MEDIAN), SPREAD) for _ in range(TURNS - 1)]
        info = {
            "seconds": [options.time_scale * min(max(one, SHORTEST), LONGEST) for one in drawn],
            "answers": ["".join(generator.choices(string.ascii_letters, k=options.answer)) for _ in drawn],
            "bad": BAD[number % len(BAD)] if generator.random() < options.bad else "",
        }
        messages = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        token_ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        extra = {**info, "tools_kwargs": {"wait": info}}
        prompts.append(Prompt(number, token_ids, "", "random", question, extra, messages))
    return prompts


class Watch:
    """Looks at this process: when each conversation was done, its most memory in MiB, and its most threads."""

    def __init__(self, rows: Sequence[Trajectory]) -> None:
        self._rows = rows
        self._ended = threading.Event()
        self.begin = self.end = time.monotonic()
        self.done: dict[int, float] = {}
        self.memory, self.threads = 0.0, 0
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._note()
        self.end = time.monotonic()

    def _look(self) -> None:
        while not self._ended.wait(0.1):
            self._note()

    def _note(self) -> None:
        now = time.monotonic()
        self.done |= {place: now for place, row in enumerate(self._rows) if row.done and place not in self.done}
        self.memory = max(self.memory, resident_mib())
        self.threads = max(self.threads, threading.active_count())

    def when(self, share: float) -> float:
        """The time at which this share of the conversations was done."""
        return sorted(self.done.values())[math.ceil(share * len(self.done)) - 1]


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def busy(calls: Sequence[Call], begin: float, end: float, least: int = 1) -> float:
    """The share of the time in which the engine decoded at least so many sequences."""
    total = 0.0
    for call in calls:
        seconds = max(0.0, min(call.end, end) - max(call.begin, begin))
        total += seconds * mean([running >= least for running in call.running] or [least == 1])
    return round(total / (end - begin), 3)


def retokenised(rows: Sequence[Trajectory], recorder: Recorder) -> int:
    """Tokens that a conversation has otherwise than the engine sampled or read them."""
    wrong = 0
    for number, asked in recorder.by_conversation().items():
        row = rows[number]
        whole = (*row.prompt, *row.token_ids)
        sampled = [token for one in asked for token in one.token_ids]
        wrong += _differences(row.sampled, sampled)
        wrong += sum(_differences(whole[: len(one.request.prompt)], one.request.prompt) for one in asked)
    return wrong


def _differences(left: Sequence[int], right: Sequence[int]) -> int:
    return abs(len(left) - len(right)) + sum(one != other for one, other in zip(left, right, strict=False))


def prefilled(recorder: Recorder) -> dict[str, int]:
    """Tokens of prompts that were submitted, those computed, and those that had to be: the first prompts, and of later
    ones what was not computed before, in whole blocks of the cache. A turn's last token is sampled, but never read."""
    submitted = computed = minimum = 0
    for asked in recorder.by_conversation().values():
        for one in asked:
            submitted += len(one.request.prompt)
            computed += len(one.request.prompt) - one.cached
        minimum += len(asked[0].request.prompt)
        for before, after in pairwise(asked):
            known = len(before.request.prompt) + len(before.token_ids) - 1
            minimum += len(after.request.prompt) - known // recorder.block * recorder.block
    return {"submitted": submitted, "computed": computed, "minimum": minimum}


def outcome(row: Trajectory) -> str:
    """How a conversation ended, for the counts."""
    if row.scored is not None and row.scored.failure:
        return f"{row.scored.failure[:60]} after {row.turns} turns"
    failed = row.environment.failed_calls if isinstance(row.environment, ToolAgent) else 0
    return f"{row.turns} turns" + (f", {failed} failed call" if failed else "")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    config = settings(options)
    tokenizer = load_tokenizer(config.model)
    prompts = made_prompts(options, tokenizer)
    with open_engine(config, options.device) as recorder:
        recorder.generate([SamplingRequest((300,), 1.0, max_tokens=8)])  # compiles, allocates
        recorder.calls.clear(), recorder.asked.clear()
        conversations = Conversations(config, recorder, tokenizer)  # type: ignore[arg-type]
        memory = resident_mib()
        begin = time.monotonic()
        rows = conversations.begin(prompts, [number * SEEDS for number in range(len(prompts))], temperature=1.0)
        with Watch(rows) as watch:
            conversations.finish(rows)
        conversations.close()
    end = watch.end
    in_calls = sum(call.end - call.begin for call in recorder.calls)
    tools = [sum(prompt.extra_info["seconds"]) for prompt in prompts if not prompt.extra_info["bad"]]
    good = [row for row, prompt in zip(rows, prompts, strict=True) if not prompt.extra_info["bad"]]
    agents = [row.environment for row in rows if isinstance(row.environment, ProgramAgent)]
    return {
        "kind": options.kind,
        "conversations": len(rows),
        "time_scale": options.time_scale,
        "seconds": round(end - begin, 1),
        "engine_seconds": round(in_calls, 1),
        "longest_tools": round(max(tools), 1),
        "tool_seconds": round(sum(tools)),
        "done_90": round(watch.when(0.9) - begin, 1),
        "done_99": round(watch.when(0.99) - begin, 1),
        "busy": busy(recorder.calls, begin, end),
        "busy_to_90": busy(recorder.calls, begin, watch.when(0.9)),
        "busy_to_99": busy(recorder.calls, begin, watch.when(0.99)),
        "busy_8_to_90": busy(recorder.calls, begin, watch.when(0.9), least=8),
        "sampled_tokens": sum(len(row.sampled) for row in rows),
        "retokenised_tokens": retokenised(rows, recorder),
        "prompt_tokens": prefilled(recorder),
        "block": recorder.block,
        "requests": len(recorder.asked),
        "engine_calls": len(recorder.calls),
        "memory_growth_mib": round(watch.memory - memory),
        "threads": watch.threads,
        "good": dict(Counter(map(outcome, good))),
        "all": dict(Counter(map(outcome, rows))),
        "failed_programs": sum(agent.failed for agent in agents),
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("kind", choices=["tools", "programs"])
    parser.add_argument("--conversations", type=int, default=1000)
    parser.add_argument("--time-scale", type=float, default=1.0)
    parser.add_argument("--bad", type=float, default=0.0, help="share of tools or programs that fail")
    parser.add_argument("--answering", type=int, default=1000, help="tools or programs at once")
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--prompt", type=int, default=160, help="tokens of a prompt")
    parser.add_argument("--turn", type=int, default=40, help="mean tokens of a turn")
    parser.add_argument("--answer", type=int, default=80, help="tokens of a tool's answer")
    parser.add_argument("--limit", type=int, default=1600, help="tokens after the prompt")
    parser.add_argument("--segment", type=int, default=64, help="rollout.segment_length")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--kv-cache-gib", type=float, default=0.5)
    parser.add_argument("--jobs", type=Path, default=Path("/tmp/slipway-jobs"))
    options = parser.parse_args()
    vocabulary = SHAPES[options.shape].vocabulary
    name = f"conversations-{options.shape}-{options.turn}"
    options.job = write_job(options.jobs / name, options.shape, 64, prompts=4, end_tokens=vocabulary // options.turn)
    hermes.ROW = hermes.CallFormat(name="hermes", parse=always_calls, opening="<tool_call>")
    Results(options.out, "conversations").add(**measure(options))


if __name__ == "__main__":
    main()
