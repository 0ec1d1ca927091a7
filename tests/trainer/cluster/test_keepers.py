"""Keepers: real processes that keep files of ranks in memory."""

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import ray

from tests.trainer.cluster.misbehaving import Worker
from tests.trainer.ray_node import ray_node
from trainer.cluster import keepers
from trainer.cluster.keepers import Keeper, KeeperLink, links, start_keepers
from trainer.cluster.nodes import Slot, find_nodes, reserve_slots
from trainer.cluster.workers import WorkerGroup
from trainer.errors import WorkerError

NODES = [f"{number:056x}" for number in (1, 2)]  # Ray takes nothing else for a node's id


@pytest.fixture(scope="module")
def slots() -> Iterator[list[Slot]]:
    """Four slots on a small Ray cluster, said to be on two nodes."""
    with ray_node():
        reserved = reserve_slots(find_nodes(1, 0) * 2, 0, timeout=60)
        yield [replace(slot, node=replace(slot.node, id=NODES[slot.rank])) for slot in reserved for _ in range(2)]


def group_on(slots: list[Slot], role: str = "actor") -> WorkerGroup[Worker]:
    group = WorkerGroup[Worker](role, timeout=120)
    for slot in slots:
        group.add(slot, Worker, {}, gpus=0)
    return group


def test_the_keeper_of_a_rank_is_on_another_node(slots: list[Slot]) -> None:
    started = start_keepers(slots, 120)
    assert [slot.node.id for slot in started.slots] == NODES
    first, second = (worker.handle for worker in started.workers)
    chosen = links(started, group_on(slots))
    assert [link.handle for link in chosen] == [second, second, first, first]
    alone = start_keepers(slots[:2], 120)
    assert len(alone) == 1
    assert {link.handle for link in links(alone, group_on(slots[:2]))} == {alone.workers[0].handle}


def test_files_are_sent_in_parts_and_kept_by_role_and_step(slots: list[Slot], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keepers, "PART_BYTES", 3)
    started = start_keepers(slots[:1], 120)
    actor, critic = (KeeperLink("keeper", started.workers[0].handle, role) for role in ("actor", "critic"))
    actor.write(1, "file", memoryview(b"of an earlier step"))
    actor.write(2, "file", memoryview(b"first try"))
    actor.write(2, "file", memoryview(b"actor"))
    critic.write(2, "file", memoryview(b"critic"))
    actor.write(2, "empty", memoryview(b""))
    started.call(Keeper.keep_only, 2)
    assert actor.read(2, "file") == [b"actor"]
    assert critic.read(2, "file", [(4, 2), (0, 3)]) == [b"ic", b"cri"]
    assert actor.read(2, "empty") == [b""]
    for step, name in ((1, "file"), (2, "other")):
        with pytest.raises(WorkerError, match=f"no copy of actor/{name} of step {step} in memory"):
            actor.read(step, name)


def test_a_dead_keeper_is_named(slots: list[Slot]) -> None:
    started = start_keepers(slots[:1], 120)
    (link,) = links(started, group_on(slots[:1]))
    ray.kill(started.workers[0].handle)
    while started.answer(60):  # Ray kills it soon
        pass
    with pytest.raises(WorkerError, match=f"{re.escape(link.name)} died, and with it the copies that it kept"):
        link.write(1, "file", memoryview(b"lost"))
    started.restart(0)
    started.call(Keeper.keep_only, 0)
    assert started.answer(60)
