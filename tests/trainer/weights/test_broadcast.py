"""Weights that the actor broadcasts to engines, with stand-ins for both and for the process group."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.cluster.calls import Task
from trainer.errors import WorkerError
from trainer.weights import transfer
from trainer.weights.transfer import Broadcast


class Actor:
    """Records what is called on its first rank."""

    timeout = 60.0

    def __init__(self, ranks: int) -> None:
        self.workers = [SimpleNamespace(spec=SimpleNamespace(slot=SimpleNamespace(node=SimpleNamespace(address="a"))))]
        self.ranks = ranks
        self.called: list[str] = []
        self.of_others: list[str] = []

    def __len__(self) -> int:
        return self.ranks

    def call(self, method: Any) -> list[list[Any]]:
        self.called.append(method.__name__)
        return [[]] * self.ranks

    def call_one(self, rank: int, method: Any, *_: Any) -> Any:
        if rank == 0:
            self.called.append(method.__name__)
        self.of_others += [method.__name__] if rank else []

    start_one = call_one


class Engines:
    """Two engines, of which those in `fail` do not receive."""

    def __init__(self, fail: Mapping[int, WorkerError]) -> None:
        self.fail = fail

    def __len__(self) -> int:
        return 2

    def attempt(self, tasks: Mapping[int, Task[Any, Any]]) -> tuple[dict[int, None], Mapping[int, WorkerError]]:
        receives = {task.method for task in tasks.values()} == {"receive_weights"}
        return {}, self.fail if receives else {}


@pytest.fixture(autouse=True)
def _calls_succeed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "outcomes", lambda calls, _: [(call, None) for call in calls])


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_was_sent_leaves_the_gpu_before_others_compute_there(ranks: int) -> None:
    actor = Actor(ranks)
    broadcast = Broadcast(actor, Engines(fail={}))  # type: ignore[arg-type]
    for _ in range(2):
        broadcast.snapshot()
        broadcast.push([0, 1])
    assert actor.called.count("send_weights") == actor.called.count("release_weights") == 2
    assert actor.called[-2:] == ["send_weights", "release_weights"]


def test_it_leaves_the_gpu_even_if_an_engine_missed_it() -> None:
    actor = Actor(2)
    broadcast = Broadcast(actor, Engines(fail={1: WorkerError("gone")}))  # type: ignore[arg-type]
    broadcast.snapshot()
    broadcast.push([0, 1])
    assert actor.called[-3:] == ["send_weights", "release_weights", "publish_sent_weights"]
