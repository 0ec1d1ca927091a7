"""All engines of a run as one: requests are spread over them, and an engine that fails is replaced."""

import logging
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Protocol, TypeVar

from trainer.cluster.calls import Task, task
from trainer.cluster.workers import WorkerGroup
from trainer.config.tree import Config
from trainer.errors import WorkerError
from trainer.rollout.sampling import Request, Response
from trainer.weights.endpoints import WeightReceiver, WeightSender
from trainer.weights.transfer import WAYS, chosen_way

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")


class EngineWorker(WeightReceiver, Protocol):
    """A worker that samples responses, as the controller calls it."""

    def chosen(self) -> tuple[str, str]: ...
    def generate(self, requests: Sequence[Request]) -> list[Response]: ...
    def sleep(self) -> None: ...


class Engines:
    """Samples with the newest weights that it was given.

    An engine that dies, fails or does not answer within `rollout.timeout` is ended and started anew in its place. It
    gets the weights that the others have and does what its predecessor left undone, with the same seeds: the step's
    responses are those that it would have had. The run ends when `rollout.max_repairs` in a row were not enough.

    `version` counts the updates since the first weights; `way` is how weights go to the engines, and why.
    """

    def __init__(
        self,
        group: WorkerGroup[EngineWorker],
        actor: WorkerGroup[WeightSender],
        config: Config,
        on_shared_gpus: bool,
    ) -> None:
        self._group = group
        self._timeout = config.rollout.timeout or group.timeout
        self._max_repairs = config.rollout.max_repairs
        actor_slots = [worker.spec.slot for worker in actor.workers]
        engine_slots = [worker.spec.slot for worker in group.workers]
        self.way = chosen_way(config.rollout.weight_transfer, actor_slots, engine_slots, on_shared_gpus)
        self._transfer = WAYS[self.way[0]](actor, group)
        self._what = "adapters" if config.actor.lora.rank else "weights"
        self.version = 0
        # Counted by the thread that samples, read by the one that writes the metrics.
        self._repairs = 0
        self._reported_repairs = 0
        self._repairs_in_a_row = 0

    def start(self) -> None:
        """Waits until all engines are up and gives them their first weights. What fails here is not repaired."""
        name, reason = self._group.call(EngineWorker.chosen)[0]
        logger.info("engines sample with %s, because %s", name, reason)
        logger.info("%s go to the engines through %s, because %s", self._what, *self.way)
        self._transfer.fetch()
        for failure in self._transfer.give(range(len(self._group))).values():
            raise failure

    def generate(self, requests: Sequence[Request]) -> list[Response]:
        """A response to each request, the requests spread over all engines."""
        parts = dict(enumerate(split(requests, len(self._group))))
        repairs, results = self._repairs, dict[int, list[Response]]()
        while parts:
            answers, failures = self._attempt({rank: task(EngineWorker.generate, part) for rank, part in parts.items()})
            results |= answers
            parts = {rank: parts[rank] for rank in failures}
            self._replace(failures)
        if self._repairs == repairs:
            self._repairs_in_a_row = 0
        return [response for rank in sorted(results) for response in results[rank]]

    def sync_weights(self) -> dict[str, float]:
        """Gives every engine the actor's weights; the metrics. Each engine sums up what it got and compares."""
        self._transfer.fetch()
        self.version += 1
        self._replace(self._transfer.give(range(len(self._group))))
        return {"rollout/synced_bytes": float(self._transfer.nbytes)}

    def sleep(self) -> None:
        """Leaves the GPUs' memory to others until the next weights come. An engine that fails is replaced then."""
        _, failures = self._attempt(dict.fromkeys(range(len(self._group)), task(EngineWorker.sleep)))
        for failure in failures.values():
            logger.warning("%s", failure)

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
        """Replaces failed engines until they are up and have the weights. Raises WorkerError if they never do."""
        while failures:
            for rank, failure in failures.items():
                self._count_repair(rank, failure)
                self._group.restart(rank)
            failures = self._transfer.give(list(failures))

    def _count_repair(self, rank: int, failure: WorkerError) -> None:
        if self._repairs_in_a_row == self._max_repairs:
            raise WorkerError(
                f"engines failed {self._max_repairs + 1} times in a row, at last: {failure}",
                hint="; ".join(filter(None, [failure.hint, "rollout.max_repairs says how often they may"])),
            )
        self._repairs += 1
        self._repairs_in_a_row += 1
        logger.warning("engine %d is replaced, repair %d in a row: %s", rank, self._repairs_in_a_row, failure)


def split(items: Sequence[Item], count: int) -> list[Sequence[Item]]:
    """Consecutive parts of nearly equal length, one for each of `count` workers; some are empty if items are few."""
    bounds = [len(items) * part // count for part in range(count + 1)]
    return [items[start:end] for start, end in pairwise(bounds)]
