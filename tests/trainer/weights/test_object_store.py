"""Weights that go through Ray's object store, with stand-ins for it, the actor and the engines."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

from trainer.cluster.calls import Task
from trainer.errors import WorkerError
from trainer.weights.transfer import ObjectStore


class Actor:
    """Publishes weights that are named by their version, as soon as it may."""

    def __init__(self) -> None:
        self.version = 0
        self.publishes, self.may_publish = Event(), Event()

    def call(self, _method: Any) -> list[Any]:
        self.version += 1
        self.publishes.set()
        assert self.may_publish.wait(10)
        return [([f"weights {self.version}"], 1)]


class Engines:
    """Records what the engines were sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def attempt(self, tasks: Mapping[int, Task[Any, Any]]) -> tuple[dict[int, None], Mapping[int, WorkerError]]:
        self.sent += [task.arguments[0] for task in tasks.values()]
        return {}, {}


def test_an_engine_that_is_restarted_while_weights_are_gathered_gets_those() -> None:
    actor, engines = Actor(), Engines()
    transfer = ObjectStore(actor, engines)  # type: ignore[arg-type]
    with ThreadPoolExecutor(2) as threads:
        gathering = threads.submit(transfer.snapshot)
        assert actor.publishes.wait(10)
        restarting = threads.submit(transfer.push, [0])
        actor.may_publish.set()
        gathering.result(10)
        restarting.result(10)
    assert engines.sent == [["weights 1"]]
