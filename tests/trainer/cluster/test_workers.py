"""Groups of Ray actors: results by rank, and failures that name the worker and its node."""

import os
import re
import time
from collections.abc import Iterator
from functools import partial

import pytest
import ray
from ray.exceptions import GetTimeoutError, RayTaskError

from tests.trainer.cluster.misbehaving import Member, Worker
from tests.trainer.ray_node import ray_node
from trainer.cluster import calls
from trainer.cluster.calls import Call, task
from trainer.cluster.nodes import ClusterNode, Slot, choose_nodes, find_nodes, reserve_slots
from trainer.cluster.stalls.explanation import Asked
from trainer.cluster.workers import WorkerGroup, show_gpus
from trainer.errors import ConfigError, DataError, WorkerError


@pytest.fixture(scope="module")
def slots() -> Iterator[list[Slot]]:
    """Two slots on a small Ray cluster."""
    with ray_node():
        yield reserve_slots(find_nodes(1, 0) * 2, 0, timeout=60)


@pytest.fixture
def group(slots: list[Slot]) -> WorkerGroup[Worker]:
    """Workers that have started, so that later failures happen within calls."""
    group = make_group(slots)
    group.call(Worker.echo, "up")
    return group


def make_group(slots: list[Slot], *problems: str) -> WorkerGroup[Worker]:
    group = WorkerGroup[Worker]("critic", timeout=120)
    for slot in slots:
        group.add(slot, partial(Worker, *problems), {"SLIPWAY_TEST": f"rank {slot.rank}"}, gpus=0)
    return group


def test_results_come_in_the_order_of_ranks(group: WorkerGroup[Worker]) -> None:
    assert group.call_each(task(Worker.echo, word) for word in ("first", "second")) == ["first", "second"]
    assert group.call(Worker.echo, "both") == ["both", "both"]
    assert group.call(Worker.environment, "SLIPWAY_TEST") == ["rank 0", "rank 1"]


def test_all_ranks_of_a_data_group_run_its_task_and_the_first_answers(slots: list[Slot]) -> None:
    group = WorkerGroup[Worker]("actor", 120, ranks_per_data_group=2)
    for slot in [*slots, *slots]:
        group.add(slot, Worker, {"SLIPWAY_TEST": f"rank {len(group)}"}, gpus=0)
    assert group.data_groups == 2
    assert group.call_data_groups(task(Worker.remember, word) for word in ("first", "second")) == ["rank 0", "rank 2"]
    assert group.call(Worker.remembered) == ["first", "first", "second", "second"]


@pytest.mark.usefixtures("slots")
def test_a_cluster_of_this_machine_remembers_as_many_calls_as_ray_can_list() -> None:
    remembered = ray.remote(num_cpus=0)(lambda: ray._config.task_events_max_num_task_in_gcs())
    assert ray.get(remembered.remote(), timeout=60) == 10_000


def test_a_dead_worker_is_named(group: WorkerGroup[Worker], slots: list[Slot]) -> None:
    with pytest.raises(WorkerError, match=rf"^critic rank 1 on {slots[1].node.address} died during die$") as caught:
        group.call_each(task(Worker.die, when) for when in ("later", "now"))
    assert "logs/" in caught.value.hint


def test_the_error_names_the_dead_worker_and_not_its_peer(group: WorkerGroup[Worker]) -> None:
    with pytest.raises(WorkerError, match=r"critic rank 1 on .* died"):
        group.call_each(task(Worker.lose_a_peer, role) for role in ("notices", "dies"))


class FakeRay:
    """Calls that never end, on a clock that advances only while waiting."""

    def __init__(self) -> None:
        self.now = 0.0

    def wait(self, references: list[object], timeout: float) -> tuple[list[object], list[object]]:
        self.now += timeout
        return [], references

    def get(self, _reference: object, timeout: float) -> None:
        self.now += timeout
        raise GetTimeoutError


def test_a_dead_worker_is_searched_for_once_among_64_fake_hanging_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRay()
    monkeypatch.setattr(calls, "ray", fake)
    monkeypatch.setattr(time, "monotonic", lambda: fake.now)
    hung = [
        Call[None](Asked(f"critic rank {rank}", "node", "update", object()), object(), object()) for rank in range(64)
    ]
    failure = RayTaskError("update", "", ValueError("bad luck"))
    explained = calls._explain(hung[0], failure, hung[1:])
    assert str(explained) == "critic rank 0 failed in update: ValueError: bad luck"
    assert fake.now == calls.CAUSE_SECONDS


def test_an_unexpected_failure_is_one_line(group: WorkerGroup[Worker]) -> None:
    with pytest.raises(WorkerError, match=r"critic rank . on .* failed in fail: RuntimeError: something odd$"):
        group.call(Worker.fail)


@pytest.mark.parametrize("constructor", [False, True])
def test_the_users_errors_arrive_unchanged(slots: list[Slot], constructor: bool) -> None:
    group = make_group(slots, *(["constructor"] if constructor else []))
    with pytest.raises(DataError, match="no model here" if constructor else "bad data") as caught:
        group.call(Worker.refuse)
    assert caught.value.hint == ("put one there" if constructor else "use good data")


def test_a_worker_that_does_not_answer_ends_the_wait(group: WorkerGroup[Worker]) -> None:
    with pytest.raises(
        WorkerError, match=r"critic rank 0 on .*, critic rank 1 on .*: no answer to sleep within 0\.5 s"
    ):
        calls.wait(group.start(Worker.sleep), timeout=0.5)


def test_a_team_fails_and_restarts_together(slots: list[Slot]) -> None:
    """The first team waits for a dead member; the second is not touched."""
    group = WorkerGroup[Member]("rollout", timeout=120)
    for slot in slots:
        group.add_team([slot] * 2, Member, {}, gpus=0)
    assert group.teams() == [range(2), range(2, 4)]
    before = group.call(Member.own_team)
    assert [(team.rank, team.size) for team in before] == [(0, 2), (1, 2)] * 2
    assert [team.meeting == before[0].meeting for team in before] == [True, True, False, False]

    tasks = {rank: task(Member.die_or_wait) if rank < 2 else task(Member.echo, "well") for rank in range(4)}
    results, failures = group.attempt(tasks)
    assert results == {2: "well", 3: "well"}
    assert set(failures) == {0, 1}
    assert all(re.search(r"rank 0 on .*, shard 1 died during die_or_wait", str(error)) for error in failures.values())

    group.restart(1)
    after = group.call(Member.own_team)
    assert after[2:] == before[2:]
    assert after[0].meeting == after[1].meeting != before[0].meeting


def test_workers_of_a_team_see_each_other_s_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    monkeypatch.delenv("HIP_VISIBLE_DEVICES", raising=False)
    show_gpus(["4", "5"])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert "HIP_VISIBLE_DEVICES" not in os.environ


def test_more_nodes_or_gpus_than_available_are_refused(slots: list[Slot]) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.nnodes=5, but the cluster has 1"):
        find_nodes(5, 0)
    with pytest.raises(ConfigError, match="has 0 GPUs, every node needs 8"):
        find_nodes(1, 8)


def node(address: str, gpus: int) -> ClusterNode:
    return ClusterNode(address, address, cpus=8, gpus=gpus)


HEAD, FIRST, SECOND = node("10.0.0.1", 0), node("10.0.0.2", 8), node("10.0.0.3", 8)


@pytest.mark.parametrize(
    ("nodes", "gpus_per_node", "chosen"),
    [
        ([HEAD, FIRST, SECOND], None, [FIRST, SECOND]),
        ([HEAD, FIRST, SECOND], 8, [FIRST, SECOND]),
        ([HEAD, FIRST, SECOND], 0, [HEAD, FIRST, SECOND]),
        ([HEAD], None, [HEAD]),
        ([FIRST, SECOND], None, [FIRST, SECOND]),
    ],
)
def test_a_first_node_without_gpus_only_drives_the_run(
    nodes: list[ClusterNode], gpus_per_node: int | None, chosen: list[ClusterNode]
) -> None:
    assert choose_nodes(nodes, None, gpus_per_node) == chosen


def test_another_node_without_gpus_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"10\.0\.0\.1 has 0 GPUs, every node needs 8"):
        choose_nodes([FIRST, HEAD], None, None)
    with pytest.raises(ConfigError, match=r"trainer\.nnodes=2, but the cluster has 1"):
        choose_nodes([HEAD, FIRST], 2, None)


def test_waiting_for_occupied_slots_times_out(slots: list[Slot]) -> None:
    with pytest.raises(WorkerError, match="did not reserve"):
        reserve_slots([slots[0].node] * 1000, 0, timeout=0.5)
