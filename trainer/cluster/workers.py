"""Groups of Ray workers, whose failures name the worker and its node."""

import importlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trainer.cluster.cores import keep_to_cores
from trainer.cluster.nodes import Slot
from trainer.errors import TrainerError, WorkerError

# After a first failure: how long to wait for its cause. A dead rank makes the collectives of the others fail too.
CAUSE_SECONDS = 3.0

LOG_HINT = "that node's Ray session directory has the worker's output in logs/worker-*.err; often memory was short"


class WorkerHost:
    """A Ray actor around a plain object, made from its import path: only the process that needs a module imports it."""

    def start(
        self, path: str, environment: Mapping[str, str], arguments: Sequence[Any], share: tuple[int, int] | None
    ) -> None:
        """Makes the object; `share` says which of how many parts of the node's cores belong to its GPU, if any do.

        Not done in the constructor, whose errors Ray turns into text.
        """
        os.environ.update(environment)
        gpus = ray.get_gpu_ids()
        if share is not None and gpus:
            keep_to_cores(gpus[0], *share)
        module, _, name = path.rpartition(".")
        self._worker = getattr(importlib.import_module(module), name)(*arguments)

    def call(self, method: str, arguments: Sequence[Any]) -> Any:
        return getattr(self._worker, method)(*arguments)


@dataclass(frozen=True)
class Recipe:
    """How a worker is made: `path` is its class, which gets the arguments; `gpus` its share of the slot's GPU."""

    slot: Slot
    path: str
    arguments: Sequence[Any]
    environment: Mapping[str, str]
    gpus: float


@dataclass(frozen=True)
class Worker:
    """One worker, how it is called in messages, how it was made, and the result of its start."""

    name: str
    recipe: Recipe
    handle: Any
    started: ObjectRef


@dataclass(frozen=True)
class Call:
    """A call under way."""

    worker: Worker
    method: str
    result: ObjectRef


class WorkerGroup:
    """The workers of one role, in the order of their ranks; `bind_cores` keeps those with a GPU to cores of its own."""

    def __init__(self, role: str, timeout: float, bind_cores: bool = False) -> None:
        self.role = role
        self.timeout = timeout
        self._bind_cores = bind_cores
        self.workers: list[Worker] = []

    def __len__(self) -> int:
        return len(self.workers)

    def add(self, slot: Slot, path: str, arguments: Sequence[Any], environment: Mapping[str, str], gpus: float) -> None:
        """Starts one more worker; returns at once."""
        self.workers.append(self._start(Recipe(slot, path, arguments, environment, gpus)))

    def restart(self, index: int) -> None:
        """Ends a worker, whatever it does, and starts another in its place; returns at once."""
        ray.kill(self.workers[index].handle)
        self.workers[index] = self._start(self.workers[index].recipe)

    def _start(self, recipe: Recipe) -> Worker:
        slot = recipe.slot
        # Of the role's name: `ps` and `ray list actors` show which worker is which.
        host = ray.remote(type(f"{self.role.capitalize()}Worker", (WorkerHost,), {})).options(
            num_cpus=0,
            num_gpus=recipe.gpus if slot.device == "cuda" else 0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(slot.group, placement_group_bundle_index=slot.rank),
        )
        handle = host.remote()
        share = (slot.local_rank, slot.local_size) if self._bind_cores else None
        started = handle.start.remote(recipe.path, recipe.environment, recipe.arguments, share)
        return Worker(f"{self.role} rank {slot.rank} on {slot.node.address}", recipe, handle, started)

    def start_one(self, index: int, method: str, *arguments: Any) -> Call:
        """A call to one worker."""
        worker = self.workers[index]
        return Call(worker, method, worker.handle.call.remote(method, arguments))

    def start(self, method: str, *arguments: Any) -> list[Call]:
        """The same call to every worker."""
        return self.start_each(method, [arguments] * len(self))

    def start_each(self, method: str, arguments: Iterable[Sequence[Any]]) -> list[Call]:
        """A call to each worker as soon as its arguments are there; to the first workers only, if those are fewer."""
        return [
            Call(worker, method, worker.handle.call.remote(method, own))
            for worker, own in zip(self.workers, arguments, strict=False)
        ]

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """The same call to every worker, and its results by rank."""
        return self.wait(self.start(method, *arguments))

    def call_each(self, method: str, arguments: Iterable[Sequence[Any]]) -> list[Any]:
        """A call to each worker with its own arguments, and its results by rank."""
        return self.wait(self.start_each(method, arguments))

    def attempt(
        self, method: str, arguments: Mapping[int, Sequence[Any]], timeout: float | None = None
    ) -> tuple[dict[int, Any], dict[int, WorkerError]]:
        """A call to some workers: the results and the failures, by rank. Other errors than WorkerError are raised."""
        calls = [self.start_one(rank, method, *own) for rank, own in arguments.items()]
        results: dict[int, Any] = {}
        failures: dict[int, WorkerError] = {}
        for rank, outcome in zip(arguments, outcomes(calls, timeout or self.timeout), strict=True):
            if isinstance(outcome, WorkerError):
                failures[rank] = outcome
            elif isinstance(outcome, Exception):
                raise outcome
            else:
                results[rank] = outcome
        return results, failures

    def wait(self, calls: Sequence[Call]) -> list[Any]:
        """The results of calls, in their order; see `wait`."""
        return wait(calls, self.timeout)


def wait(calls: Sequence[Call], timeout: float) -> list[Any]:
    """The results of calls, in their order; the first failure ends the wait.

    Raises WorkerError, naming worker and node, if a worker died, failed or has not answered in time. What a worker
    raised as a TrainerError comes back as it is.
    """
    results: dict[ObjectRef, Any] = {}
    for call in _as_they_end(calls, timeout):
        try:
            results[call.result] = ray.get(call.result)
        except RayError as error:
            others = [other for other in calls if other is not call and other.result not in results]
            raise _explain(call, error, others) from error
    if missing := [call for call in calls if call.result not in results]:
        raise _no_answer(missing, timeout)
    return [results[call.result] for call in calls]


def outcomes(calls: Sequence[Call], timeout: float) -> list[Any]:
    """What became of each call, in their order: its result, or the error that `wait` would have raised for it."""
    found = {call.result: _outcome(call) for call in _as_they_end(calls, timeout)}
    return [found[call.result] if call.result in found else _no_answer([call], timeout) for call in calls]


def _as_they_end(calls: Sequence[Call], timeout: float) -> Iterator[Call]:
    """Those calls that end within so many seconds, each when it has: results are unpacked while others are made."""
    deadline = time.monotonic() + timeout
    pending = {call.result: call for call in calls}
    while pending:
        ended, _ = ray.wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ended:
            return
        yield pending.pop(ended[0])


def _outcome(call: Call) -> Any:
    try:
        return ray.get(call.result)
    except RayError as error:
        return _explain(call, error, [])


def _no_answer(calls: Sequence[Call], timeout: float) -> WorkerError:
    names = ", ".join(call.worker.name for call in calls)
    return WorkerError(
        f"{names}: no answer to {calls[0].method} within {timeout:g} s",
        hint="raise trainer.worker_timeout if the work is long, and look whether the node still answers",
    )


def _explain(call: Call, error: RayError, others: Sequence[Call]) -> TrainerError:
    """The failure as the user should read it: one at the start explains later ones, a death those who noticed it."""
    start = Call(call.worker, "start", call.worker.started)
    if (at_start := _failure(start, 0)) is not None:
        call, error = start, at_start
    if isinstance(error, RayTaskError) and isinstance(error.cause, TrainerError):
        return error.cause
    if not isinstance(error, RayActorError):
        for other in _as_they_end(others, CAUSE_SECONDS):
            if isinstance(death := _failure(other, 0), RayActorError):
                call, error = other, death
                break
    if isinstance(error, RayActorError):
        return WorkerError(f"{call.worker.name} died during {call.method}", hint=LOG_HINT)
    cause = error.cause if isinstance(error, RayTaskError) else error
    return WorkerError(f"{call.worker.name} failed in {call.method}: {type(cause).__name__}: {cause}", hint=LOG_HINT)


def _failure(call: Call, seconds: float) -> RayError | None:
    """How a call failed; None if it has not failed within that time."""
    try:
        ray.get(call.result, timeout=seconds)
    except GetTimeoutError:
        return None
    except RayError as error:
        return error
    return None
