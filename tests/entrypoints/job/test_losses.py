"""Nodes that are lost, silent, stopped, or come back; spares; signals while the job runs."""

import signal
from pathlib import Path

import pytest

from tests.entrypoints.conftest import REPOSITORY, Launch, Start, running_pair
from tests.process_table import alive


def test_a_lost_worker_ends_the_job(start_node: Start) -> None:
    head, worker = running_pair(start_node)
    worker.signal_all(signal.SIGKILL)
    ended = head.wait()
    assert ended.status == 13
    assert "lost: connection " in ended.stderr  # closed, or reset with a heartbeat unread


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_launch_ends_the_job_with_its_name(start_node: Start, rank: int) -> None:
    pair = running_pair(start_node, "echo up; echo $$; exec sleep 60")
    command = int(pair[0].read_line())
    pair[rank].signal(signal.SIGKILL)
    told = pair[1 - rank].wait()
    assert told.status == 13
    assert f"node {rank} (" in told.stderr
    assert "lost: its launch was killed" in told.stderr
    assert not alive(command)


def test_a_lost_head_ends_the_job(start_node: Start) -> None:
    # Without the head nothing ends the command, so it must be short.
    head, worker = running_pair(start_node, "echo up; exec sleep 3")
    head.signal_all(signal.SIGKILL)
    ended = worker.wait()
    assert ended.status == 13
    assert "node 0 (localhost) lost: connection" in ended.stderr


def test_a_command_that_fails_because_of_a_silent_node_does_not_hide_it(start_node: Start) -> None:
    """As Ray's actors there die, or stop to answer, before `launch` counts the node as lost."""
    head, worker = running_pair(start_node, "echo up; sleep 6; exit 5")
    worker.signal_all(signal.SIGSTOP)
    ended = head.wait()
    worker.signal_all(signal.SIGCONT)
    assert ended.status == 13
    assert "lost: no heartbeat for 10 s" in ended.stderr


def test_a_command_that_fails_by_itself_ends_the_job_at_once(start_node: Start) -> None:
    head, worker = running_pair(start_node, "echo up; exit 5")
    assert (head.wait().status, worker.wait().status) == (5, 5)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_any_node_ends_all(start_node: Start, rank: int) -> None:
    pair = running_pair(start_node)
    pair[rank].signal(signal.SIGTERM)
    ends = [launch.wait() for launch in pair]
    assert [end.status for end in ends] == [143, 143]
    assert all(f"node {rank} (" in end.stderr and "received SIGTERM" in end.stderr for end in ends)


SAVE = "trap 'echo saving; sleep 2; echo saved; exit 0' TERM; echo up; sleep 60 & wait"


def test_a_schedulers_warning_to_a_worker_gives_the_command_time(start_node: Start) -> None:
    worker = start_node(1, "--no-ray", "--grace", "0.1", "--", "true")
    head = start_node(0, "--no-ray", "--grace", "0.1", "--", "sh", "-c", SAVE)
    assert head.read_line() == "up"
    worker.signal(signal.SIGUSR1)
    ended = head.wait()
    assert (ended.status, worker.wait().status) == (138, 138)
    assert ended.stdout == "saving\nsaved\n"


@pytest.mark.parametrize(("number", "options"), [(signal.SIGTERM, ("--min-nodes", "1")), (signal.SIGUSR1, ())])
def test_a_signal_to_all_nodes_at_once_leaves_the_command_its_time_and_its_workers(
    start_node: Start, number: signal.Signals, options: tuple[str, ...]
) -> None:
    grace = ("--grace", "30") if number == signal.SIGTERM else ("--grace", "0.1")
    worker = start_node(1, "--no-ray", *grace, *options, "--", "true")
    head = start_node(0, "--no-ray", *grace, *options, "--", "sh", "-c", SAVE)
    assert head.read_line() == "up"
    worker.signal(number)  # the worker first, so that the head hears of it before its own signal arrives
    assert head.read_line() == "saving"
    assert worker.running
    head.signal(number)
    ended = head.wait()
    assert ended.stdout == "saved\n"
    assert (ended.status, worker.wait().status) == (128 + number, 128 + number)


def test_a_clock_that_is_off_by_an_hour_is_refused(start_node: Start, tmp_path: Path) -> None:
    # This changes the worker's `time.time`, not the machine's clock.
    (tmp_path / "sitecustomize.py").write_text("import time\nhere = time.time\ntime.time = lambda: here() + 3600\n")
    head = start_node(0, "--no-ray", "--", "true", SLIPWAY_DEADLINE="6")
    worker = start_node(1, "--no-ray", "--", "true", PYTHONPATH=f"{tmp_path}:{REPOSITORY}")
    assert "its clock is 3600 s ahead of the head's" in worker.wait().stderr
    ended = head.wait()
    assert ended.status == 12
    assert "refused: its clock is 3600 s ahead of the head's" in ended.stderr


def test_with_enough_nodes_left_the_command_restarts(start_node: Start) -> None:
    hosts = {"SLIPWAY_HOSTS": "localhost,worker-1.invalid,worker-2.invalid"}
    script = "echo nodes $SLIPWAY_NODE_COUNT; [ $SLIPWAY_NODE_COUNT = 3 ] || exit 7; exec sleep 60"
    workers = [start_node(rank, "--no-ray", "--", "true", **hosts) for rank in (1, 2)]
    head = start_node(0, "--no-ray", "--min-nodes", "2", "--", "sh", "-c", script, **hosts)
    assert head.read_line() == "nodes 3"
    workers[0].signal(signal.SIGKILL)
    assert head.read_line() == "nodes 2"
    ended = head.wait()
    assert (ended.status, workers[1].wait().status) == (7, 7)
    assert "node 1 (" in ended.stderr
    assert "continuing with 2 nodes" in ended.stderr


THREE = {"SLIPWAY_HOSTS": "localhost,worker-1.invalid,worker-2.invalid"}


def wait_for_line(launch: Launch, words: str) -> str:
    while words not in (line := launch.read_error()):
        assert line, f"no line with {words!r}"
    return line


def test_a_node_that_comes_back_waits_and_is_used_after_the_next_loss(start_node: Start) -> None:
    script = "echo start; exec sleep 60"
    workers = [start_node(rank, "--no-ray", "--", "true", **THREE) for rank in (1, 2)]
    head = start_node(0, "--no-ray", "--min-nodes", "2", "--", "sh", "-c", script, **THREE)
    assert head.read_line() == "start"
    workers[0].signal_all(signal.SIGKILL)
    assert head.read_line() == "start"
    passing = start_node(1, "--no-ray", "--", "true", **THREE)  # comes and goes: the others go on
    wait_for_line(head, ", a spare")
    passing.signal_all(signal.SIGKILL)
    wait_for_line(head, "a spare is lost: ")
    back = start_node(1, "--no-ray", "--", "true", **THREE)
    wait_for_line(head, ", a spare")
    workers[1].signal_all(signal.SIGKILL)
    assert head.read_line() == "start"
    head.signal(signal.SIGTERM)
    assert (head.wait().stdout, back.wait().status) == ("", 143)


def test_an_unfit_node_that_comes_back_is_refused(start_node: Start) -> None:
    worker = start_node(1, "--no-ray", "--", "true")
    script = "echo nodes $SLIPWAY_NODE_COUNT; exec sleep 60"
    head = start_node(0, "--no-ray", "--min-nodes", "1", "--", "sh", "-c", script)
    assert head.read_line() == "nodes 2"
    worker.signal_all(signal.SIGKILL)
    assert head.read_line() == "nodes 1"
    ended = start_node(1, "--no-ray", "--", "true", SLIPWAY_TEST_NOFILE="1000").wait()
    assert ended.status == 12
    assert "refused this node: it is not fit: nofile: at most 1000 files may be open" in ended.stderr


def test_a_spare_takes_the_place_of_a_lost_node(start_node: Start) -> None:
    script = "echo nodes $SLIPWAY_NODE_COUNT; exec sleep 60"
    workers = {rank: start_node(rank, "--no-ray", "--", "true", **THREE) for rank in (1, 2)}
    head = start_node(0, "--no-ray", "--spares", "1", "--", "sh", "-c", script, **THREE)
    assert head.read_line() == "nodes 2"
    spare = 1 if "node 1 " in wait_for_line(head, ", a spare") else 2  # the one that came last
    workers[3 - spare].signal_all(signal.SIGKILL)
    assert head.read_line() == "nodes 2"
    workers[spare].signal_all(signal.SIGKILL)
    ended = head.wait()
    assert ended.status == 13
    assert f"node {spare} (" in ended.stderr


def test_more_spares_than_nodes_are_refused(start_node: Start) -> None:
    ended = start_node(0, "--no-ray", "--spares", "2", "--", "true").wait()
    assert ended.status == 2
    assert "--spares is 2, but explicit says 2 nodes" in ended.stderr


def test_with_too_few_nodes_left_the_job_ends(start_node: Start) -> None:
    worker = start_node(1, "--no-ray", "--", "true")
    head = start_node(0, "--no-ray", "--min-nodes", "2", "--", "sh", "-c", "echo up; exec sleep 60")
    assert head.read_line() == "up"
    worker.signal(signal.SIGKILL)
    assert head.wait().status == 13


def test_a_stopped_worker_counts_as_lost(start_node: Start) -> None:
    worker = start_node(1, "--no-ray", "--", "true")
    script = "echo nodes $SLIPWAY_NODE_COUNT; [ $SLIPWAY_NODE_COUNT = 1 ] || exec sleep 60"
    head = start_node(0, "--no-ray", "--min-nodes", "1", "--", "sh", "-c", script)
    assert head.read_line() == "nodes 2"
    worker.signal(signal.SIGTERM)
    assert head.read_line() == "nodes 1"
    assert head.wait().status == 0
    assert worker.wait().status == 143


def test_enough_nodes_at_the_deadline_are_enough(start_node: Start) -> None:
    hosts = {"SLIPWAY_HOSTS": "localhost,worker-1.invalid,worker-2.invalid", "SLIPWAY_DEADLINE": "6"}
    worker = start_node(1, "--no-ray", "--", "true", **hosts)
    head = start_node(0, "--no-ray", "--min-nodes", "2", "--", "sh", "-c", "exit $SLIPWAY_NODE_COUNT", **hosts)
    ended = head.wait()
    assert (ended.status, worker.wait().status) == (2, 2)
    assert "continuing with 2 of 3 nodes" in ended.stderr
    assert "without node 2 (worker-2.invalid): never connected; name does not resolve" in ended.stderr
