"""Stalls are explained: the worker that others wait for, and where. Real processes in a real process group."""

import logging
import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from threading import Timer

import pytest

from tests.process_table import named
from tests.trainer.cluster.misbehaving import Collective
from tests.trainer.ray_node import ray_node
from trainer.cluster import calls
from trainer.cluster.nodes import Slot, find_nodes, reserve_slots
from trainer.cluster.stalls import reading
from trainer.cluster.stalls.collectives import GroupState
from trainer.cluster.stalls.explanation import Asked, explain
from trainer.cluster.stalls.reading import Readers
from trainer.cluster.stalls.stacks import Frame, Standing, parse_stacks
from trainer.cluster.stalls.watch import Watch
from trainer.cluster.workers import WorkerGroup
from trainer.errors import WorkerError

RANKS = 2


@pytest.fixture(scope="module")
def slots() -> Iterator[list[Slot]]:
    with ray_node():
        yield reserve_slots(find_nodes(1, 0) * RANKS, 0, timeout=60)


@pytest.fixture
def group(slots: list[Slot], tmp_path: Path) -> WorkerGroup[Collective]:
    group = WorkerGroup[Collective]("actor", timeout=60)
    for slot in slots:
        group.add(slot, partial(Collective, slot.rank, RANKS, str(tmp_path / "store")), {}, gpus=0)
    group.call(Collective.meet)
    return group


def explained(started: list[calls.Call[None]]) -> tuple[str, ...]:
    """What is said two seconds after a call began."""
    time.sleep(2)
    return explain(Readers().read([call.asked for call in started]).standings).lines


def test_the_late_rank_is_named_with_its_place_and_those_that_wait_for_it(group: WorkerGroup[Collective]) -> None:
    late, waiting = explained(group.start(Collective.meet_late, 1))
    assert late.startswith("actor rank 1 on ")
    assert "waits in load_something_slow (tests/trainer/cluster/misbehaving.py:" in late
    assert waiting.startswith("actor rank 0 on ")
    assert " waits in all_reduce (distributed/distributed_c10d.py:" in waiting
    assert ", for actor rank 1 on " in waiting


def test_a_rank_that_computes_without_end_is_told_from_one_that_waits(group: WorkerGroup[Collective]) -> None:
    assert " computes in meet_after_endless_work (" in explained(group.start(Collective.meet_after_endless_work, 1))[0]


def test_a_stopped_process_and_one_that_ended_are_told_apart(group: WorkerGroup[Collective]) -> None:
    first, second = group.call(Collective.pid)
    started = group.start(Collective.meet)
    os.kill(first, signal.SIGSTOP)
    try:
        assert explained(group.start(Collective.meet_late, 1))[0].endswith(" is stopped by a signal (SIGSTOP)")
        os.kill(second, signal.SIGKILL)
        assert "has ended" in explained(started)[1]
    finally:
        os.kill(first, signal.SIGCONT)


def test_a_frozen_node_accepts_connections_and_does_not_answer(
    group: WorkerGroup[Collective], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "PATIENCE", 6.0)
    asked = [call.asked for call in group.start(Collective.pid)]
    before, readers = set(named("ray::_Reader")), Readers()
    readers.read(asked)
    (frozen,) = set(named("ray::_Reader")) - before
    os.kill(frozen, signal.SIGSTOP)
    try:
        said = readers.read(asked)
    finally:
        os.kill(frozen, signal.SIGCONT)
    assert list(said.hosts.values()) == [None]
    assert "is on a node that does not answer: it accepts connections" in explain(said.standings).lines[0]


def test_ranks_in_the_same_collective_share_a_line() -> None:
    inside = (Frame("/x/torch/distributed/distributed_c10d.py", 9, "all_gather"), Frame("/x/trainer/a.py", 3, "norm"))
    call = Frame("/x/trainer/cluster/workers.py", 70, "call")
    reading = (Frame("/x/trainer/data/read.py", 5, "read"), call)
    standings = {
        Asked(f"actor rank {rank}", "n", "update", object()): Standing("", ((*inside, call),)) for rank in range(7)
    }
    standings[Asked("actor rank 7", "n", "update", object())] = Standing("", (reading,))
    assert explain(standings).lines == (
        "actor rank 7 waits in read (data/read.py:5)",
        "actor rank 0, and 6 more: waits in all_gather (distributed/distributed_c10d.py:9), "
        "called by norm (trainer/a.py:3), for actor rank 7",
    )


def test_a_rank_that_skipped_a_collective_is_behind_the_others() -> None:
    inside = (Frame("/x/torch/distributed/distributed_c10d.py", 9, "all_gather"),)
    call = Frame("/x/trainer/cluster/workers.py", 70, "call")
    standings = {
        Asked(f"actor rank {rank}", "n", "update", None): Standing(
            "", ((*inside, call),), groups=(GroupState("0", rank, 3, 12 if rank == 1 else 14),)
        )
        for rank in range(3)
    }
    said = explain(standings)
    assert [culprit.worker for culprit in said.culprits] == ["actor rank 1"]
    assert said.lines[0].endswith("; this is its collective 12 in the process group, the others are in 14")


def test_a_stall_is_logged_while_the_run_waits_and_named_at_its_end_and_no_call_that_ends_is_one(
    group: WorkerGroup[Collective], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with calls.watched(Watch(1.0, run_dir=tmp_path)), caplog.at_level(logging.WARNING):
        calls.wait(group.start(Collective.meet), timeout=20)
        late = group.start(Collective.meet_late, 1)
        with pytest.raises(WorkerError, match="no answer to meet_late within 12 s") as ended:
            calls.wait(late, timeout=12)
    assert "load_something_slow" in str(ended.value)
    assert caplog.messages[0] == "no progress in meet_late for 6 s:"  # half of the limit, for the first such call
    assert "actor rank 1" in caplog.messages[1]
    assert "actor rank 0" in caplog.messages[2]
    assert caplog.messages[-1] == f"  stacks and the state of every node: {tmp_path / 'stall.html'}"
    assert len(caplog.messages) <= 11
    page = (tmp_path / "stall.html").read_text()
    assert "load_something_slow" in page
    assert "meet_late" in page
    assert "rank 0 of 2: 3, the latest is gloo:all_reduce" in page
    assert "rank 1 of 2: 2, the latest is gloo:all_reduce" in page
    assert "the run&#39;s directory" in page
    assert "network eth0" in page


def test_on_stall_end_ends_the_call_when_it_stalls(group: WorkerGroup[Collective]) -> None:
    with calls.watched(Watch(1.0, ends=True)), pytest.raises(WorkerError, match="meet_late within 2 s") as ended:
        calls.wait(group.start(Collective.meet_late, 1), timeout=4)
    assert "trainer.on_stall=continue waits" in ended.value.hint


def test_the_controller_itself_is_named_when_it_hangs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.mkfifo(tmp_path / "prompts.jsonl")
    watch = Watch(0.4, run_dir=tmp_path)
    late_writer = Timer(3, (tmp_path / "prompts.jsonl").write_text, ("late",))
    with caplog.at_level(logging.WARNING), watch.controller(limit=1):
        late_writer.start()
        assert (tmp_path / "prompts.jsonl").read_text() == "late"
    assert caplog.messages[0].startswith("no progress in the controller for ")
    assert " waits in open (" in caplog.messages[1]
    assert "called by " not in caplog.messages[1] or "test_stalls.py" in caplog.messages[1]
    assert "the controller" in (tmp_path / "stall.html").read_text()


def test_a_controller_that_computes_without_end_is_told_from_one_that_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), Watch(0.4, run_dir=tmp_path).controller(limit=1):
        records, deadline = caplog.handler.records, time.monotonic() + 30
        while len(records) < 2 and time.monotonic() < deadline:
            pass  # calls nothing of pytest's, in which the controller could be found
    assert " computes in test_a_controller_that_computes_without_end" in caplog.messages[1]


def test_patience_follows_the_longest_call_of_the_kind() -> None:
    watch = Watch()
    assert watch.seconds("actor update", limit=300) == 150
    watch.learn("actor update", 5)
    watch.learn("actor update", 2)
    assert watch.seconds("actor update", limit=300) == 60
    watch.learn("actor update", 40)
    assert watch.seconds("actor update", limit=300) == 120
    assert watch.seconds("rollout generate", limit=30) == 60  # never before the limit


def test_faulthandler_s_report_is_parsed() -> None:
    text = (
        "Thread 0x00007f01 (most recent call first):\n"
        '  File "/usr/lib/python3.11/threading.py", line 324 in wait\n'
        "\n"
        "Current thread 0x00007f02 (most recent call first):\n"
        '  File "/a b/x.py", line 7 in <module>\n'
        "\n"
        "Extension modules: numpy.core (total: 1)\n"
    )
    wait = Frame("/usr/lib/python3.11/threading.py", 324, "wait")
    assert parse_stacks(text) == ((wait,), (Frame("/a b/x.py", 7, "<module>"),))
    assert str(wait) == "wait (python3.11/threading.py:324)"
