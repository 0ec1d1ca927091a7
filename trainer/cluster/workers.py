"""Groups of Ray workers, one group per role."""

import os
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import ray
from ray import ObjectRef
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trainer.cluster.calls import Call, Task, outcomes, task, wait
from trainer.cluster.cores import keep_to_cores
from trainer.cluster.garbage import without_collections
from trainer.cluster.nodes import Slot
from trainer.cluster.place import Team
from trainer.cluster.stalls.explanation import Asked
from trainer.cluster.stalls.stacks import Probe, open_probe
from trainer.errors import TrainerError, WorkerError

P = ParamSpec("P")
R = TypeVar("R")
W_co = TypeVar("W_co", covariant=True)

# Ray sets the one that the GPUs' maker uses.
VISIBLE_GPUS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


class WorkerHost:
    """A Ray actor around a plain object, which it makes itself: only this process imports what the object needs."""

    def gpus(self) -> list[str]:
        """The ids of the GPUs that Ray gave to this process."""
        return [str(gpu) for gpu in ray.get_gpu_ids()]

    def probe(self) -> Probe:
        """Where other processes read this one's stacks. Called first, because a start may hang."""
        return open_probe()

    def start(
        self,
        make: Callable[[Team], object],
        environment: Mapping[str, str],
        share: tuple[int, int] | None,
        team: Team,
        *gpus_of_team: Sequence[str],
    ) -> None:
        """Makes the object. `share` is (i, n) for the i-th of n GPUs of the node, whose nearest cores this process
        keeps to; None leaves it on all cores. `gpus_of_team` are the GPUs of each worker of a team, by rank.

        Not part of the constructor: Ray turns a constructor's errors into text.
        """
        os.environ.update(environment)
        if share is not None and (visible_gpus := self.gpus()):
            keep_to_cores(visible_gpus[0], *share)
        if team.size > 1:
            show_gpus([gpu for gpus in gpus_of_team for gpu in gpus])
        with without_collections():
            self._worker = make(team)

    def call(self, method: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        return getattr(self._worker, method)(*arguments, **keywords)


def show_gpus(gpus: Sequence[str]) -> None:
    """Makes these GPUs of the node visible to this process, numbered in this order. Call it before torch is imported.

    Ray shows each process only its own, but processes that copy between their GPUs must see both.
    """
    for name in VISIBLE_GPUS:
        if name in os.environ:
            os.environ[name] = ",".join(gpus)


@dataclass(frozen=True)
class WorkerSpec:
    """How to make a worker: `make` runs in its process, `gpus` is its share of the slot's GPU, and it is number
    `team_rank` of the `team_size` workers that start, fail and restart together."""

    slot: Slot
    make: Callable[[Team], object]
    environment: Mapping[str, str]
    gpus: float
    team_rank: int = 0
    team_size: int = 1


@dataclass(frozen=True)
class Worker:
    """A worker: its name in messages, how it was made, its Ray actor, its probe, and the result of its start."""

    name: str
    spec: WorkerSpec
    handle: Any
    probe: ObjectRef
    started: ObjectRef


class WorkerGroup(Generic[W_co]):
    """The workers of one role, in the order of their ranks. Each is a W in a process of its own.

    Methods take a method of W, or of an interface that W implements, and its arguments; see `trainer.cluster.calls`.
    """

    def __init__(self, role: str, timeout: float, bind_cores: bool = False, ranks_per_data_group: int = 1) -> None:
        """Without workers yet. `timeout` seconds are the limit of a call; `bind_cores` keeps each worker that has a
        GPU to the cores next to it; so many neighbouring ranks, a data group, compute the same rows."""
        self.role = role
        self.timeout = timeout
        self._bind_cores = bind_cores
        self._ranks_per_data_group = ranks_per_data_group
        self.workers: list[Worker] = []

    def __len__(self) -> int:
        return len(self.workers)

    @property
    def data_groups(self) -> int:
        """How many data groups the workers form."""
        return len(self) // self._ranks_per_data_group

    def add(self, slot: Slot, make: Callable[[], W_co], environment: Mapping[str, str], gpus: float) -> None:
        """Starts one more worker; returns at once. `make` is sent to its process, so it should import lazily."""
        self.add_team([slot], lambda _: make(), environment, gpus)

    def add_team(
        self, slots: Sequence[Slot], make: Callable[[Team], W_co], environment: Mapping[str, str], gpus: float
    ) -> None:
        """Starts one more worker in each of these slots of a node; returns at once. If one fails, all are restarted."""
        specs = [WorkerSpec(slot, make, environment, gpus, rank, len(slots)) for rank, slot in enumerate(slots)]
        self.workers += self._start(specs)

    @property
    def slots(self) -> list[Slot]:
        """The slot of each worker, by rank."""
        return [worker.spec.slot for worker in self.workers]

    def answer(self, seconds: float) -> bool:
        """Whether every worker is alive and has ended its calls within this time."""
        end = time.monotonic() + seconds
        pending = [worker.handle.gpus.remote() for worker in self.workers]
        while pending:
            ended, pending = ray.wait(pending, timeout=max(0.0, end - time.monotonic()))
            try:
                ray.get(ended)
            except RayError:
                return False
            if not ended:
                return False
        return True

    def teams(self) -> list[range]:
        """The ranks of the workers that start, fail and restart together."""
        return [self._team(rank) for rank, worker in enumerate(self.workers) if worker.spec.team_rank == 0]

    def restart(self, rank: int) -> None:
        """Kills a worker with its team and starts others in their place; returns at once."""
        team = self._team(rank)
        for worker in self.workers[team.start : team.stop]:
            ray.kill(worker.handle)
        self.workers[team.start : team.stop] = self._start([self.workers[rank].spec for rank in team])

    def _team(self, rank: int) -> range:
        spec = self.workers[rank].spec
        return range(rank - spec.team_rank, rank - spec.team_rank + spec.team_size)

    def _start(self, specs: Sequence[WorkerSpec]) -> list[Worker]:
        """Starts the workers of one team."""
        hosts = [self._host(spec) for spec in specs]
        meeting = f"slipway-{uuid.uuid4().hex}"
        # The workers wait for these ids; this process does not.
        gpus = [host.gpus.remote() for host in hosts] if len(hosts) > 1 else []
        workers = []
        for spec, host in zip(specs, hosts, strict=True):
            slot, team = spec.slot, Team(spec.team_rank, spec.team_size, meeting)
            share = (slot.local_rank, slot.local_size) if self._bind_cores else None
            probe = host.probe.remote()
            started = host.start.remote(spec.make, spec.environment, share, team, *gpus)
            workers.append(Worker(self._name(spec), spec, host, probe, started))
        return workers

    def _name(self, spec: WorkerSpec) -> str:
        # On CPU a whole team has the same slot.
        shard = f", shard {spec.team_rank}" if spec.team_size > 1 and spec.slot.device == "cpu" else ""
        return f"{self.role} rank {spec.slot.rank} on {spec.slot.node.address}{shard}"

    def _host(self, spec: WorkerSpec) -> Any:
        """The Ray actor of a worker."""
        slot = spec.slot
        # The class is named after the role, so that `ps` and `ray list actors` show which worker is which.
        host = ray.remote(type(f"{self.role.capitalize()}Worker", (WorkerHost,), {})).options(
            num_cpus=0,
            num_gpus=spec.gpus if slot.device == "cuda" else 0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(slot.group, placement_group_bundle_index=slot.rank),
        )
        return host.remote()

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
        return [self._run(worker, assigned) for worker, assigned in zip(self.workers, tasks, strict=True)]

    def call_one(
        self, rank: int, method: Callable[Concatenate[W_co, P], R], *arguments: P.args, **keywords: P.kwargs
    ) -> R:
        """The result of a call to one worker."""
        return self.wait([self.start_one(rank, method, *arguments, **keywords)])[0]

    def call(self, method: Callable[Concatenate[W_co, P], R], *arguments: P.args, **keywords: P.kwargs) -> list[R]:
        """The results of the same call to every worker, by rank."""
        return self.wait(self.start(method, *arguments, **keywords))

    def call_each(self, tasks: Iterable[Task[W_co, R]], timeout: float | None = None) -> list[R]:
        """The results of one task per worker, by rank; `timeout` replaces the group's."""
        return wait(self.start_each(tasks), timeout or self.timeout)

    def call_data_groups(self, tasks: Iterable[Task[W_co, R]]) -> list[R]:
        """The results of one task per data group. All of its ranks run it; the result is that of the first."""
        size = self._ranks_per_data_group
        of_ranks = (assigned for once in tasks for assigned in [once if size == 1 else once.stored()] * size)
        return self.call_each(of_ranks)[::size]

    def attempt(
        self, tasks: Mapping[int, Task[W_co, R]], timeout: float | None = None
    ) -> tuple[dict[int, R], dict[int, WorkerError]]:
        """Runs tasks on some workers: the results and the failures, by rank. Raises errors other than WorkerError.

        If a worker fails, its team fails with it: the others are killed, because they would wait for it.
        """
        ranks = {self._run(self.workers[rank], assigned): rank for rank, assigned in tasks.items()}
        results: dict[int, R] = {}
        failures: dict[int, WorkerError] = {}
        for call, outcome in outcomes(list(ranks), timeout or self.timeout):
            rank = ranks[call]
            if isinstance(outcome, WorkerError):
                for other in self._team(rank):
                    if failures.setdefault(other, outcome) is outcome and other != rank:
                        ray.kill(self.workers[other].handle)
            elif isinstance(outcome, TrainerError):
                raise outcome
            else:
                results[rank] = outcome
        return {rank: result for rank, result in results.items() if rank not in failures}, failures

    def wait(self, calls: Sequence[Call[R]]) -> list[R]:
        """The results of calls to this group, in their order; see `trainer.cluster.calls.wait`."""
        return wait(calls, self.timeout)

    @staticmethod
    def _run(worker: Worker, assigned: Task[W_co, R]) -> Call[R]:
        result = worker.handle.call.remote(assigned.method, assigned.arguments, assigned.keywords)
        node = worker.spec.slot.node
        asked = Asked(worker.name, node.id, assigned.method, worker.probe, node.address)
        return Call(asked, result, worker.started, (node.id, worker.spec.slot.rank))
