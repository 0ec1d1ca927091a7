"""Weights that engines copy on the GPUs that they share with the actor, with stand-ins for both: sharing memory needs a
GPU."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from trainer.cluster.calls import Task
from trainer.errors import WorkerError
from trainer.weights.buckets import BucketLayout, SharedBucket, SharedPart
from trainer.weights.transfer import SharedGpus

LAYOUT = BucketLayout(("w",), ((4,),), torch.float32)


class Group:
    """The slots of a group's workers."""

    def __init__(self, slots: list[int]) -> None:
        self.workers = [SimpleNamespace(spec=SimpleNamespace(slot=SimpleNamespace(rank=slot))) for slot in slots]


class Actor(Group):
    """Shares three parts of one bucket each, named by slot and place; records what was called."""

    def __init__(self, slots: list[int]) -> None:
        super().__init__(slots)
        self.slots = slots
        self.called: list[Any] = []

    def call(self, method: Any, *arguments: Any) -> list[Any]:
        self.called.append((method.__name__, *arguments))
        place = len(self.called) - 1
        return [SharedPart([SharedBucket(LAYOUT, (slot, place))], ends=place == 2) for slot in self.slots]


class Engines(Group):
    """Records the handles of what each rank copied; those in `fail` fail with that part."""

    def __init__(self, slots: list[int], fail: Mapping[int, int]) -> None:
        super().__init__(slots)
        self.fail = fail
        self.copied: dict[int, list[tuple[Any, ...]]] = {rank: [] for rank in range(len(slots))}

    def attempt(self, tasks: Mapping[int, Task[Any, Any]]) -> tuple[dict[int, None], dict[int, WorkerError]]:
        failures = {}
        for rank, task in tasks.items():
            part, begins = task.arguments
            (bucket,) = part.buckets
            self.copied[rank].append((*bucket.handle, begins, part.ends))
            if self.fail.get(rank) == bucket.handle[1]:
                failures[rank] = WorkerError("gone")
        return {}, failures


def test_stand_ins_copy_each_part_from_the_rank_on_their_gpu() -> None:
    actor, engines = Actor([5, 6]), Engines([6, 5, 5], fail={})
    transfer = SharedGpus(actor, engines)  # type: ignore[arg-type]
    assert transfer.push(range(3)) == {}
    assert engines.copied[0] == [(6, 0, True, False), (6, 1, False, False), (6, 2, False, True)]
    assert engines.copied[1] == engines.copied[2] == [(5, *place_and_when) for _, *place_and_when in engines.copied[0]]
    assert actor.called == [("share_weights", True), *[("share_weights", False)] * 2, ("release_weights",)]
    assert transfer.nbytes == 3 * LAYOUT.nbytes


def test_a_stand_in_that_fails_gets_no_further_part_and_the_others_all() -> None:
    actor, engines = Actor([5, 6]), Engines([5, 6], fail={0: 1})
    failures = SharedGpus(actor, engines).push([0, 1])  # type: ignore[arg-type]
    assert list(failures) == [0]
    assert [len(engines.copied[rank]) for rank in (0, 1)] == [2, 3]
    assert actor.called[-1] == ("release_weights",)


def test_only_the_engines_asked_for_copy() -> None:
    engines = Engines([5, 6], fail={})
    SharedGpus(Actor([5, 6]), engines).push([1])  # type: ignore[arg-type]
    assert engines.copied[0] == []
    assert len(engines.copied[1]) == 3
