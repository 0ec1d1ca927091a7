"""Groups of Ray workers, one group per role."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import ray
from ray import ObjectRef
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trainer.cluster.calls import Call, Task, outcomes, task, wait
from trainer.cluster.cores import keep_to_cores
from trainer.cluster.nodes import Slot
from trainer.errors import WorkerError

P = ParamSpec("P")
R = TypeVar("R")
W_co = TypeVar("W_co", covariant=True)


class WorkerHost:
    """A Ray actor around a plain object, which it makes itself: only this process imports what the object needs."""

    def start(self, make: Callable[[], object], environment: Mapping[str, str], share: tuple[int, int] | None) -> None:
        """Makes the object. `share` is (i, n) for the i-th of n GPUs of the node, whose nearest cores this process
        keeps to; None leaves it on all cores.

        Not part of the constructor: Ray turns a constructor's errors into text.
        """
        os.environ.update(environment)
        gpus = ray.get_gpu_ids()
        if share is not None and gpus:
            keep_to_cores(gpus[0], *share)
        self._worker = make()

    def call(self, method: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        return getattr(self._worker, method)(*arguments, **keywords)


@dataclass(frozen=True)
class WorkerSpec:
    """How to make a worker: `make` runs in its process, `gpus` is its share of the slot's GPU."""

    slot: Slot
    make: Callable[[], object]
    environment: Mapping[str, str]
    gpus: float


@dataclass(frozen=True)
class Worker:
    """A worker: its name in messages, how it was made, its Ray actor, and the result of its start."""

    name: str
    spec: WorkerSpec
    handle: Any
    started: ObjectRef


class WorkerGroup(Generic[W_co]):
    """The workers of one role, in the order of their ranks. Each is a W in a process of its own.

    Methods take a method of W, or of an interface that W implements, and its arguments; see `trainer.cluster.calls`.
    """

    def __init__(self, role: str, timeout: float, bind_cores: bool = False) -> None:
        """Without workers yet. `timeout` seconds are the limit of a call; `bind_cores` keeps each worker that has a
        GPU to the cores next to it."""
        self.role = role
        self.timeout = timeout
        self._bind_cores = bind_cores
        self.workers: list[Worker] = []

    def __len__(self) -> int:
        return len(self.workers)

    def add(self, slot: Slot, make: Callable[[], W_co], environment: Mapping[str, str], gpus: float) -> None:
        """Starts one more worker; returns at once. `make` is sent to its process, so it should import lazily."""
        self.workers.append(self._start(WorkerSpec(slot, make, environment, gpus)))

    def restart(self, rank: int) -> None:
        """Kills a worker and starts another in its place; returns at once."""
        ray.kill(self.workers[rank].handle)
        self.workers[rank] = self._start(self.workers[rank].spec)

    def _start(self, spec: WorkerSpec) -> Worker:
        slot = spec.slot
        # The class is named after the role, so that `ps` and `ray list actors` show which worker is which.
        host = ray.remote(type(f"{self.role.capitalize()}Worker", (WorkerHost,), {})).options(
            num_cpus=0,
            num_gpus=spec.gpus if slot.device == "cuda" else 0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(slot.group, placement_group_bundle_index=slot.rank),
        )
        handle = host.remote()
        share = (slot.local_rank, slot.local_size) if self._bind_cores else None
        started = handle.start.remote(spec.make, spec.environment, share)
        return Worker(f"{self.role} rank {slot.rank} on {slot.node.address}", spec, handle, started)

    def start_one(
        self, rank: int, method: Callable[Concatenate[W_co, P], R], *arguments: P.args, **keywords: P.kwargs
    ) -> Call[R]:
        """Starts a call to one worker."""
        return self._run(self.workers[rank], task(method, *arguments, **keywords))

    def start(
        self, method: Callable[Concatenate[W_co, P], R], *arguments: P.args, **keywords: P.kwargs
    ) -> list[Call[R]]:
        """Starts the same call to every worker."""
        return self.start_each([task(method, *arguments, **keywords)] * len(self))

    def start_each(self, tasks: Iterable[Task[W_co, R]]) -> list[Call[R]]:
        """Starts one task per worker, each as soon as the iterable yields it."""
        return [self._run(worker, own) for worker, own in zip(self.workers, tasks, strict=True)]

    def call_one(
        self, rank: int, method: Callable[Concatenate[W_co, P], R], *arguments: P.args, **keywords: P.kwargs
    ) -> R:
        """The result of a call to one worker."""
        return self.wait([self.start_one(rank, method, *arguments, **keywords)])[0]

    def call(self, method: Callable[Concatenate[W_co, P], R], *arguments: P.args, **keywords: P.kwargs) -> list[R]:
        """The results of the same call to every worker, by rank."""
        return self.wait(self.start(method, *arguments, **keywords))

    def call_each(self, tasks: Iterable[Task[W_co, R]]) -> list[R]:
        """The results of one task per worker, by rank."""
        return self.wait(self.start_each(tasks))

    def attempt(
        self, tasks: Mapping[int, Task[W_co, R]], timeout: float | None = None
    ) -> tuple[dict[int, R], dict[int, WorkerError]]:
        """Runs tasks on some workers: the results and the failures, by rank. Raises errors other than WorkerError."""
        calls = [self._run(self.workers[rank], own) for rank, own in tasks.items()]
        results: dict[int, R] = {}
        failures: dict[int, WorkerError] = {}
        for rank, outcome in zip(tasks, outcomes(calls, timeout or self.timeout), strict=True):
            if isinstance(outcome, WorkerError):
                failures[rank] = outcome
            elif isinstance(outcome, Exception):
                raise outcome
            else:
                results[rank] = outcome
        return results, failures

    def wait(self, calls: Sequence[Call[R]]) -> list[R]:
        """The results of calls to this group, in their order; see `trainer.cluster.calls.wait`."""
        return wait(calls, self.timeout)

    @staticmethod
    def _run(worker: Worker, own: Task[W_co, R]) -> Call[R]:
        result = worker.handle.call.remote(own.method, own.arguments, own.keywords)
        return Call(worker.name, own.method, result, worker.started)
