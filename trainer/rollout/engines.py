"""All engines of a run as one: spreads requests over them and replaces engines that fail."""

import logging
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import itemgetter
from typing import Protocol, TypeVar

from trainer.cluster.calls import Task, task
from trainer.cluster.workers import WorkerGroup
from trainer.config.tree import Config
from trainer.errors import WorkerError
from trainer.rollout.engine import engine_rows
from trainer.rollout.occupancy import Occupancy
from trainer.rollout.sampling import Part, Response, SamplingRequest
from trainer.weights.transfer import TRANSPORTS, WeightReceiver, WeightSender, choose_transport

logger = logging.getLogger(__name__)

_KEEPS_CACHE = "responses continue under new weights and keep their KV cache"
_REPEATS_PREFILL = "responses continue under new weights, with a new prefill after each rollout.segment_length"
_FINISHES = "responses finish under the weights that they began with: rollout.segment_length holds whole responses"

Item = TypeVar("Item")
Result = TypeVar("Result")


class EngineWorker(WeightReceiver, Protocol):
    """A worker that samples responses, as the controller calls it."""

    def chosen(self) -> tuple[str, str]: ...
    def notices(self) -> list[str]: ...
    def generate(self, requests: Sequence[SamplingRequest]) -> list[Response]: ...
    def advance(self, new: Mapping[int, SamplingRequest], steps: int) -> dict[int, Part]: ...
    def sleep(self) -> None: ...
    def take_occupancy(self) -> Occupancy: ...


@dataclass(frozen=True)
class EngineWork:
    """What all engines did in some seconds: how full they were, and the tokens that they sampled."""

    occupancy: Occupancy
    tokens: int
    seconds: float


class Engines:
    """Samples with the newest weights.

    An engine that dies, fails or does not answer within `rollout.timeout` is restarted. The new engine receives the
    current weights and serves the unfinished requests with the same seeds, so the responses of the step do not change.
    The run ends after more than `rollout.max_repairs` failures in a row.

    `version` counts the updates since the first weights. `transport` is how weights are sent, and the reason.
    `in_flight`, known after `start`, means that `advance` can be called: an asynchronous run then calls nothing else.
    """

    def __init__(
        self,
        group: WorkerGroup[EngineWorker],
        actor: WorkerGroup[WeightSender],
        config: Config,
        on_shared_gpus: bool,
    ) -> None:
        self._group = group
        self._engines = group.teams()
        self._timeout = config.rollout.timeout or group.timeout
        self._max_repairs = config.rollout.max_repairs
        actor_slots = [worker.spec.slot for worker in actor.workers]
        engine_slots = [worker.spec.slot for worker in group.workers]
        self.transport = choose_transport(
            config.rollout.weight_transfer, actor_slots, engine_slots, on_shared_gpus, config.trainer.deterministic
        )
        self._connect = partial(TRANSPORTS[self.transport[0]], actor, group)
        self._transfer = self._connect()
        self._gathered = False
        self._on_shared_gpus = on_shared_gpus
        self._payload = "adapters" if config.engines_apply_adapters else "weights"
        self._asynchronous = config.trainer.mode == "asynchronous"
        self._drafted = config.rollout.speculative_tokens
        # Segments that hold whole responses let each finish under the weights that it began with.
        self._partial = config.rollout.segment_length < config.data.max_response_length
        self._sleep_forgets = config.rollout.sleep
        self._held: list[set[int]] = [set() for _ in self._engines]
        self.in_flight = False
        self.version = 0
        # Counted by the thread that samples, read by the one that writes the metrics.
        self._repairs = 0
        self._reported_repairs = 0
        self._repairs_in_a_row = 0
        self._sampled_tokens = 0
        self._taken = time.monotonic()

    def start(self) -> None:
        """Waits until all engines are up and sends the first weights. Failures here are not repaired."""
        name, reason = self._group.call(EngineWorker.chosen)[0]
        logger.info("engines sample with %s, because %s", name, reason)
        for notice in self._group.call(EngineWorker.notices)[0]:
            logger.info("%s", notice)
        if self._drafted:
            logger.info("engines draft at most %d tokens per response and step, while drafts pay", self._drafted)
        self.in_flight = engine_rows()[name].in_flight and (self._partial or not self._asynchronous)
        if self._asynchronous:
            logger.info("%s", _KEEPS_CACHE if self.in_flight else _REPEATS_PREFILL if self._partial else _FINISHES)
        logger.info("%s go to the engines through %s, because %s", self._payload, *self.transport)
        for failure in self._send().values():
            raise failure

    def generate(self, requests: Sequence[SamplingRequest], homes: Sequence[int] | None = None) -> list[Response]:
        """One response per request, in the same order. The requests are spread over all engines.

        Requests with the same number in `homes` go to the same engine, which may have cached the start of their prompt.
        """
        count = len(self._engines)
        spread = split(range(len(requests)), count) if homes is None else _at_home(homes, count)
        parts = {
            ranks: [requests[place] for place in share] for ranks, share in zip(self._engines, spread, strict=True)
        }
        repairs, results = self._repairs, dict[int, list[Response]]()
        while parts:
            # All ranks of an engine sample together, and the first returns the responses.
            asked = {rank: task(EngineWorker.generate, part) for ranks, part in parts.items() for rank in ranks}
            answers, failures = self._attempt(asked)
            results |= answers
            parts = {ranks: part for ranks, part in parts.items() if ranks.start in failures}
            self._replace(failures)
        if self._repairs == repairs:
            self._repairs_in_a_row = 0
        answered = [response for rank in sorted(results) for response in results[rank]]
        self._sampled_tokens += sum(len(response.token_ids) for response in answered)
        places = [place for share in spread for place in share]
        return [response for _, response in sorted(zip(places, answered, strict=True), key=itemgetter(0))]

    @property
    def under_way(self) -> Set[int]:
        """The numbers of the responses in flight."""
        return set().union(*self._held)

    def advance(
        self, new: Mapping[int, SamplingRequest], steps: int, homes: Mapping[int, int] | None = None
    ) -> dict[int, Part]:
        """Starts requests, each under a number of the caller's, and samples for so many steps on every engine.

        Returns the new tokens of the responses in flight, by number. Those of an engine that failed are not in flight
        any more. A request goes to its engine in `homes`, or with others of the same prompt to the least busy one.
        """
        parts = self._placed(new, homes or {})
        asked = {
            rank: task(EngineWorker.advance, part, steps)
            for ranks, part, held in zip(self._engines, parts, self._held, strict=True)
            if part or held
            for rank in ranks
        }
        for held, part in zip(self._held, parts, strict=True):
            held.update(part)
        answers, failures = self._attempt(asked)
        self._replace(failures)
        if not failures:
            self._repairs_in_a_row = 0
        sampled: dict[int, Part] = {}
        for ranks, held in zip(self._engines, self._held, strict=True):
            sampled |= answers.get(ranks.start, {})
            held.difference_update([number for number in held if number in sampled and sampled[number].finished])
        self._sampled_tokens += sum(len(part.token_ids) for part in sampled.values())
        return sampled

    def _placed(self, new: Mapping[int, SamplingRequest], homes: Mapping[int, int]) -> list[dict[int, SamplingRequest]]:
        """The requests that each engine starts."""
        parts: list[dict[int, SamplingRequest]] = [{} for _ in self._engines]
        loads = [len(held) for held in self._held]
        prompt, engine = None, 0
        for number, request in new.items():
            if number in homes:
                prompt, engine = None, homes[number] % len(parts)
            elif request.prompt != prompt:
                prompt, engine = request.prompt, loads.index(min(loads))
            parts[engine][number] = request
            loads[engine] += 1
        return parts

    def gather_weights(self) -> None:
        """Takes a snapshot of the weights that `sync_weights` sends next, where engines may sample meanwhile."""
        if self._transfer.beside_sampling:
            self._transfer.snapshot()
            self._gathered = True

    def sync_weights(self) -> dict[str, float]:
        """Sends the actor's weights to every engine and returns the metrics. Each engine compares checksums."""
        self._replace(self._send())
        self.version += 1
        return {"rollout/synced_bytes": float(self._transfer.nbytes)}

    def reconnect(self, version: int) -> None:
        """Sends the weights of an actor that was started again; they are of this version, whatever the engines hold."""
        self.version = version
        self._transfer = self._connect()
        self._gathered = False
        self._replace(self._send())

    def _send(self) -> dict[int, WorkerError]:
        if self._on_shared_gpus:
            self.sleep()  # if they do not yet: the actor's weights take the room of their cache
        if not self._gathered:
            self._transfer.snapshot()
        self._gathered = False
        return self._transfer.push(range(len(self._group)))

    def sleep(self) -> None:
        """Frees the engines' GPU memory until the next weights arrive. An engine that fails is replaced then."""
        if self._sleep_forgets:
            self._held = [set() for _ in self._engines]
        self._fall_asleep(range(len(self._group)))

    def _fall_asleep(self, ranks: Sequence[int]) -> None:
        _, failures = self._attempt(dict.fromkeys(ranks, task(EngineWorker.sleep)))
        for failure in failures.values():
            logger.warning("%s", failure)

    def take_work(self) -> EngineWork:
        """What the engines did since the last call. Call it while none samples; an engine that fails is replaced when
        it gets its next weights."""
        taken, _ = self._attempt(dict.fromkeys(range(len(self._group)), task(EngineWorker.take_occupancy)))
        begun, self._taken = self._taken, time.monotonic()
        tokens, self._sampled_tokens = self._sampled_tokens, 0
        return EngineWork(sum(taken.values(), Occupancy()), tokens, self._taken - begun)

    def take_repairs(self) -> int:
        """Engines replaced since the last call."""
        repairs = self._repairs
        new, self._reported_repairs = repairs - self._reported_repairs, repairs
        return new

    def _attempt(
        self, tasks: Mapping[int, Task[EngineWorker, Result]]
    ) -> tuple[dict[int, Result], dict[int, WorkerError]]:
        return self._group.attempt(tasks, self._timeout)

    def _replace(self, failures: Mapping[int, WorkerError]) -> None:
        """Restarts failed engines until they have the weights. Raises WorkerError after too many failures."""
        while failures:
            for number, ranks in enumerate(self._engines):
                if ranks.start in failures:  # and with it all ranks
                    self._count_repair(number, failures[ranks.start])
                    self._group.restart(ranks.start)
                    self._held[number] = set()
            if self._on_shared_gpus:
                self._fall_asleep(list(failures))
            failures = self._transfer.push(list(failures))

    def _count_repair(self, number: int, failure: WorkerError) -> None:
        if self._repairs_in_a_row == self._max_repairs:
            raise WorkerError(
                f"engines failed {self._max_repairs + 1} times in a row, at last: {failure}",
                hint="; ".join(filter(None, [failure.hint, "rollout.max_repairs is the limit"])),
            )
        self._repairs += 1
        self._repairs_in_a_row += 1
        logger.warning("engine %d is restarted, repair %d in a row: %s", number, self._repairs_in_a_row, failure)


def _at_home(homes: Sequence[int], count: int) -> list[Sequence[int]]:
    """The places of the requests that each of `count` engines serves."""
    return [[place for place, home in enumerate(homes) if home % count == engine] for engine in range(count)]


def split(items: Sequence[Item], count: int) -> list[Sequence[Item]]:
    """Splits items into `count` consecutive parts of nearly equal length; some are empty if there are few items."""
    bounds = [len(items) * part // count for part in range(count + 1)]
    return [items[start:end] for start, end in pairwise(bounds)]
