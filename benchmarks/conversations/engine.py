"""The trainer's vLLM engine in a process of its own, and a record of what it was asked."""

import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from trainer.config.tree import Config
from trainer.rollout.end_tokens import end_token_ids
from trainer.rollout.sampling import Part, Response, SamplingRequest

SEEDS = 1_000_000  # between two conversations, so that a request's seed names its conversation


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
    from trainer.rollout.vllm.settings import engine_environment

    os.environ.update(engine_environment(enforce_eager=device == "cpu"))
    from trainer.rollout.occupancy import sampling_load
    from trainer.rollout.vllm.engine import VllmEngine

    engine = VllmEngine(config, device, end_tokens)
    connection.send(engine._engine.llm_engine.vllm_config.cache_config.block_size)
    while True:
        method, arguments = connection.recv()
        begin = time.monotonic()
        with sampling_load(engine.load) as loads:
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
        by_conversation: dict[int, list[Asked]] = {}
        for asked in self.asked:
            by_conversation.setdefault(asked.request.seed // SEEDS, []).append(asked)
        return by_conversation


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
