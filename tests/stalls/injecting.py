"""A job of real workers into which stalls are injected one after the other."""

import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Protocol, Self
from unittest.mock import patch

import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tests.chaos.injection import NotStartedError
from tests.stalls import controller
from tests.stalls.faults import ALONE, MEETING, Injection
from tests.stalls.rank import BEGUN, NETWORK, Rank
from tests.stalls.records import Record
from trainer.cluster import calls
from trainer.cluster.connection import connected
from trainer.cluster.nodes import find_nodes, reserve_slots
from trainer.cluster.stalls import watch as watching
from trainer.cluster.stalls.explanation import Asked, Explanation
from trainer.cluster.stalls.reading import Reading
from trainer.cluster.stalls.watch import Watch
from trainer.cluster.workers import WorkerGroup
from trainer.errors import TrainerError, WorkerError

TIMEOUT = 60.0  # seconds of a call
JOINING = 120.0  # seconds for all nodes to join
HEALTHY = 0.1  # seconds of a healthy phase


class Releasing(Watch):
    """Ends the injected fault once it is explained. It knows the healthy time of each phase."""

    def __init__(self, stall_seconds: float, run_dir: Path) -> None:
        super().__init__(stall_seconds, run_dir=run_dir)
        self.release: Callable[[], None] = lambda: None
        self.explained = 0.0
        for phase in MEETING + ALONE:
            self.learn(f"actor {phase}", HEALTHY)
        self.learn("controller", HEALTHY)

    def learn(self, kind: str, seconds: float, asked: Sequence[Asked] = ()) -> None:
        """A busy machine makes no phase a long one."""
        super().learn(kind, min(seconds, HEALTHY), asked)

    def ready(self, asked: Sequence[Asked]) -> None:
        """Returns once each node has its reader, as in any run after its first step. Raises NotStartedError."""
        if silent := [address for address, host in self._readers.read(asked).hosts.items() if host is None]:
            raise NotStartedError(f"no reader of stalls on {', '.join(silent)}")

    def _say(self, method: str, seconds: float, explanation: Explanation, reading: Reading) -> None:
        super()._say(method, seconds, explanation, reading)
        self.explained = time.monotonic()
        self.release()


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Job:
    """Workers in one process group, on this machine or, one each, on the nodes at RAY_ADDRESS; a context manager."""

    def __init__(self, folder: Path, ranks: int, stall_seconds: float, nodes: int = 1) -> None:
        self.nodes = nodes
        self.folder, self.ranks = folder, ranks
        self.run_dir = Path("/full") if Path("/full").is_dir() else folder
        self.said = Lines()
        self.watch = Releasing(stall_seconds, self.run_dir)
        self._stack = ExitStack()
        self._starts = 0

    def __enter__(self) -> Self:
        try:
            self._enter()
        except BaseException:
            self._stack.close()
            raise
        return self

    def _enter(self) -> None:
        variables = {"RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(Path(__file__).parents[2])}
        self._stack.enter_context(patch.dict(os.environ, variables))
        if self.nodes == 1:
            node = {"num_cpus": self.ranks, "object_store_memory": 100 * 2**20, "include_dashboard": False}
            cluster = Cluster(initialize_head=True, head_node_args=node)
            self._stack.callback(cluster.shutdown)
            self._stack.enter_context(patch.dict(os.environ, RAY_ADDRESS=cluster.address))
        self._connect()
        watching.logger.addHandler(self.said)
        self._stack.callback(watching.logger.removeHandler, self.said)
        self._stack.enter_context(calls.watched(self.watch))
        self.slots = reserve_slots(find_nodes(self.nodes, 0) * (self.ranks // self.nodes), 0, timeout=TIMEOUT)
        self.start()

    def _connect(self) -> None:
        """Returns once all nodes have joined. Raises NotStartedError."""
        end, why = time.monotonic() + JOINING, ""
        while time.monotonic() < end:
            try:
                self._stack.enter_context(connected())
                break
            except WorkerError as error:
                why = str(error)
                time.sleep(0.5)
        else:
            raise NotStartedError(why)
        while sum(node["Alive"] for node in ray.nodes()) < self.nodes:
            if time.monotonic() > end:
                raise NotStartedError(f"{self.nodes} nodes did not join within {JOINING:.0f} s")
            time.sleep(0.5)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def start(self) -> None:
        """Starts the workers, and lets each phase pass once. Raises NotStartedError."""
        self._starts += 1
        folder = self.folder / str(self._starts)
        folder.mkdir()
        self.begun = folder / BEGUN
        self.group = WorkerGroup[Rank]("actor", timeout=TIMEOUT)
        for slot in self.slots:
            self.group.add(slot, partial(Rank, slot.rank, self.ranks, str(folder)), {}, gpus=0)
        try:
            started = self.group.start(Rank.pid)
            self.pids = self.group.wait(started)
            self.watch.ready([call.asked for call in started])
            for phase in MEETING + ALONE:
                self.run(phase)
        except TrainerError as error:
            raise NotStartedError(str(error)) from error

    def run(self, phase: str) -> None:
        self.group.call(getattr(Rank, phase))

    def restart(self) -> None:
        for worker in self.group.workers:
            ray.kill(worker.handle)
        self.start()

    def address(self, rank: int) -> str:
        return self.slots[rank].node.address

    def arm(self, injection: Injection) -> None:
        """After some healthy phases, the next phase misbehaves. Raises NotStartedError."""
        self.begun.unlink(missing_ok=True)
        try:
            for phase in injection.healthy:
                self.run(phase)
            if injection.fault.at == "rank":
                self.group.call_one(injection.rank, Rank.arm, injection.fault.act, injection.round)
        except WorkerError as error:
            raise NotStartedError(str(error)) from error
        self.watch.explained = 0.0
        self.said.lines.clear()

    def result(self, injection: Injection, begin: float, lines: Sequence[str], **addresses: str) -> Record:
        """The verdict on what was said."""
        return Record(
            f"{self.ranks} ranks" if self.nodes == 1 else f"{self.nodes} nodes",
            injection.fault.name,
            injection.seed,
            injection.rank,
            injection.phase,
            injection.round,
            injection.right(list(lines), self.address(injection.rank), **addresses),
            round((self.watch.explained or time.monotonic()) - begin, 1),
            list(lines),
        )


def inject(job: Job, injection: Injection) -> Record:
    """Injects a fault of a rank or of the controller, and waits for the explanation and for the end of the phase.

    Raises NotStartedError if it was not injected, or if something else took too long before it began.
    """
    job.arm(injection)
    if injection.fault.at == "controller":
        return _stall_the_controller(job, injection)
    early: list[str] = []

    def release() -> None:
        if not job.begun.exists():
            early.extend(job.said.lines)
        _release(job, injection)

    job.watch.release = release
    begin, died = time.monotonic(), ""
    try:
        job.run(injection.phase)
    except WorkerError as error:
        died = str(error)
    finally:
        job.watch.release = lambda: None
    lines = list(job.said.lines)
    if died:
        lines = [died, *lines] if injection.fault.act == "die" else [*lines, died]
    outcome = job.result(injection, begin, lines)
    if died or early:
        job.restart()
    if early:
        raise NotStartedError(f"a stall was explained before the fault began: {early}")
    return outcome


class Outside(Protocol):
    """Who injects faults of whole nodes, from outside of them."""

    begun: float
    """When the fault began; 0 before that."""

    def start(self) -> None:
        """The phases begin."""

    def end(self) -> None:
        """The fault is explained."""


def stall_a_node(job: Job, injection: Injection, outside: Outside) -> Record:
    """Takes phases until the fault is explained that `outside` injects into a node."""
    job.arm(injection)
    early: list[str] = []

    def explained() -> None:
        if not outside.begun:
            early.extend(job.said.lines)
        outside.end()

    job.watch.release = explained
    outside.start()
    started, died = time.monotonic(), ""
    try:
        while not job.watch.explained and time.monotonic() - (outside.begun or started) < TIMEOUT:
            if outside.begun and injection.fault.act == "slow down":
                job.group.call_one(injection.rank, Rank.arm, "compute", injection.round)
            job.run(injection.phase)
    except WorkerError as error:
        died = str(error)
    finally:
        job.watch.release = lambda: None
    if early or not outside.begun:
        raise NotStartedError(f"the fault had not begun: {early or died}")
    address = job.address(injection.rank)
    addresses = {"head": job.address(0), "collectives": os.environ[NETWORK] + address.rpartition(".")[2]}
    outcome = job.result(injection, outside.begun, [*job.said.lines, *filter(None, [died])], **addresses)
    if died:
        outside.end()
        job.restart()
    return outcome


def healthy_steps(job: Job, seconds: float) -> tuple[int, int]:
    """Takes phases in a random order; how many, and how many explanations of stalls were logged."""
    random, begin, steps = Random(0), time.monotonic(), 0
    job.said.lines.clear()
    while time.monotonic() - begin < seconds:
        job.run(random.choice(MEETING + ALONE))
        steps += 1
    return steps, sum(line.startswith("no progress in ") for line in job.said.lines)


def _stall_the_controller(job: Job, injection: Injection) -> Record:
    begin = time.monotonic()
    path = job.begun.with_name(f"fifo-{injection.seed}-{begin}")
    os.mkfifo(path)
    job.watch.release = partial(controller.release, path)

    def ended() -> bool:
        return job.watch.explained > 0 or time.monotonic() - begin > TIMEOUT

    with job.watch.waiting():  # the controller's time begins when its last wait ends
        pass
    with job.watch.controller(TIMEOUT):
        getattr(controller, injection.fault.act)(path, ended)
    job.watch.release = lambda: None
    return job.result(injection, begin, job.said.lines)


def send_signal(pid: int, number: int) -> None:
    """To a process of the node on which this runs."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _release(job: Job, injection: Injection) -> None:
    """Ends a rank's fault."""
    if injection.fault.act == "skip_a_collective":
        job.group.start_one(injection.rank, Rank.meet)
        return
    pid, number = job.pids[injection.rank], injection.fault.release
    if job.nodes == 1:
        send_signal(pid, number)
        return
    there = NodeAffinitySchedulingStrategy(job.slots[injection.rank].node.id, soft=False)
    ray.remote(send_signal).options(num_cpus=0, scheduling_strategy=there).remote(pid, number)
