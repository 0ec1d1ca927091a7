"""Several nodes on loopback without Ray: handshakes, refusals, losses, signals and the common exit status."""

import json
import signal
import socket
import time
from pathlib import Path

import pytest

from entrypoints.environments import detect
from entrypoints.host.tree import Tree
from entrypoints.wire.job_directory import shared_home
from entrypoints.wire.rendezvous import HeadNote, leave, meeting_place
from tests.entrypoints.conftest import REPOSITORY, Launch, Start, alive


def test_all_nodes_exit_with_the_commands_status(start_node: Start) -> None:
    worker = start_node(1, "--no-ray", "--", "echo", "not here")
    head = start_node(0, "--no-ray", "--", "sh", "-c", "echo $SLIPWAY_NODE_COUNT; exit 7")
    assert (head.wait().status, worker.wait().status) == (7, 7)


def test_the_command_runs_on_the_head_only_and_without_the_secret(start_node: Start) -> None:
    worker = start_node(1, "--no-ray", "--", "printenv")
    head = start_node(0, "--no-ray", "--", "printenv")
    printed = head.wait().stdout
    assert "SLIPWAY_NODE_COUNT=2" in printed
    assert "open sesame" not in printed
    assert worker.wait().stdout == ""


def test_other_tasks_of_a_node_wait_and_exit_with_the_same_status(start: Start) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    step = {"SLURM_JOB_ID": "5", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "localhost"}
    common = {**step, "SLURM_NODEID": "0", "SLIPWAY_TOKEN": "open sesame, please", "SLIPWAY_CONTROL_PORT": port}
    head = start("--no-ray", "--", "sh", "-c", "echo up; sleep 2; exit 9", **common, SLURM_LOCALID="0")
    assert head.read_line() == "up"
    task = start("--no-ray", "--", "echo", "twice", **common, SLURM_LOCALID="1")
    ended = task.wait()
    assert (ended.status, ended.stdout) == (9, "")
    assert "launch[0.1 worker]" in ended.stderr
    assert head.wait().status == 9


def test_a_task_that_connects_after_the_command_gets_its_status(start: Start) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    step = {"SLURM_JOB_ID": "5", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "localhost"}
    step |= {
        "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLIPWAY_TOKEN": "open sesame, please",
        "SLIPWAY_CONTROL_PORT": port,
    }
    head = start("--no-ray", "--", "sh", "-c", "echo ran; exit 9", **step, SLURM_LOCALID="0")
    assert head.read_line() == "ran"
    time.sleep(1)  # the command has ended
    task = start("--no-ray", "--", "echo", "twice", **step, SLURM_LOCALID="1")
    assert (task.wait().status, head.wait().status) == (9, 9)


def test_a_missing_node_is_named_with_its_cause(start_node: Start) -> None:
    ended = start_node(0, "--no-ray", "--", "true", SLIPWAY_DEADLINE="1").wait()
    assert ended.status == 12
    assert "1 of 2 nodes missing after 1 s" in ended.stderr
    assert "node 1 (worker-1.invalid): never connected; name does not resolve" in ended.stderr


def test_both_sides_report_a_wrong_token(start_node: Start) -> None:
    head = start_node(0, "--no-ray", "--", "true", SLIPWAY_DEADLINE="4")
    worker = start_node(1, "--no-ray", "--", "true", SLIPWAY_TOKEN="open barley, not the other", SLIPWAY_DEADLINE="4")
    told, refused = head.wait(), worker.wait()
    assert (told.status, refused.status) == (12, 12)
    assert "name does not resolve; 127.0.0.1 called itself this node: wrong token" in told.stderr
    assert told.stderr.count("refused 127.0.0.1") == 1
    assert "the program there says that this node has the wrong token" in refused.stderr
    assert "open" not in (told.stderr + refused.stderr).replace("openssl", "")


@pytest.mark.parametrize("source", ["SLIPWAY_TOKEN", "SLIPWAY_TOKEN_FILE"])
def test_a_short_token_is_refused(start_node: Start, tmp_path: Path, source: str) -> None:
    (tmp_path / "token").touch(mode=0o600)
    (tmp_path / "token").write_text("hunter2\n", encoding="ascii")
    given = "hunter2" if source == "SLIPWAY_TOKEN" else str(tmp_path / "token")
    ended = start_node(1, "--no-ray", "--", "true", **{"SLIPWAY_TOKEN": "", source: given}).wait()
    assert ended.status == 11
    assert "has 7 characters; a token needs at least 16" in ended.stderr
    assert "openssl rand -hex 32" in ended.stderr
    assert "hunter2" not in ended.stderr


def test_a_second_node_with_the_same_rank_is_refused(start_node: Start) -> None:
    hosts = {"SLIPWAY_HOSTS": "localhost,worker-1.invalid,worker-2.invalid"}
    head = start_node(0, "--no-ray", "--", "true", SLIPWAY_DEADLINE="3", **hosts)
    workers = [start_node(1, "--no-ray", "--", "true", **hosts) for _ in range(2)]
    ends = [worker.wait() for worker in workers]
    told = head.wait()
    assert [told.status, *(end.status for end in ends)] == [12, 12, 12]
    assert sum("refused this node: rank 1 is already taken by" in end.stderr for end in ends) == 1
    assert "node 2 (worker-2.invalid): never connected" in told.stderr
    assert "was refused as node 1: rank 1 is already taken" in told.stderr


def test_a_head_whose_name_belongs_to_another_host_is_reported(start_node: Start) -> None:
    hosts = {"SLIPWAY_HOSTS": "203.0.113.7,worker-1.invalid"}
    told = start_node(0, "--no-ray", "--", "true", SLIPWAY_DEADLINE="1", **hosts).wait()
    assert told.status == 12
    assert "this is node 0, but 203.0.113.7 is not an address of this host: do two nodes claim rank 0?" in told.stderr


def test_nodes_of_another_job_are_refused(start_node: Start) -> None:
    head = start_node(0, "--no-ray", "--", "true", SLIPWAY_DEADLINE="2")
    worker = start_node(1, "--no-ray", "--", "true", SLIPWAY_HOSTS="localhost,other")
    assert "job differs" in worker.wait().stderr
    assert "refused: job differs" in head.wait().stderr


@pytest.mark.parametrize(
    ("head", "cause"), [("localhost", "connection refused"), ("head.invalid", "its name does not resolve")]
)
def test_a_worker_without_a_head_reports_the_cause(start_node: Start, head: str, cause: str) -> None:
    began = time.monotonic()
    ended = start_node(1, "--no-ray", "--", "true", SLIPWAY_DEADLINE="1", SLIPWAY_HOSTS=f"{head},worker-1").wait()
    assert ended.status == 12
    assert f"within 1 s: {cause}" in ended.stderr
    assert ("its name resolves to 127.0.0.1, which is this node itself" in ended.stderr) == (head == "localhost")
    assert time.monotonic() - began < 5


@pytest.mark.usefixtures("ipv6")
def test_a_head_that_is_an_ipv6_address_is_shown_in_brackets(start_node: Start) -> None:
    ended = start_node(1, "--no-ray", "--", "true", SLIPWAY_DEADLINE="1", SLIPWAY_HOSTS="::1,worker-1").wait()
    assert "the head at [::1]:" in ended.stderr


def test_a_taken_control_port_is_an_error(start_node: Start) -> None:
    with socket.create_server(("", 0)) as other:
        port = str(other.getsockname()[1])
        ended = start_node(0, "--no-ray", "--", "true", SLIPWAY_CONTROL_PORT=port).wait()
    assert ended.status == 12
    assert f"cannot listen on control port {port}" in ended.stderr


def test_a_second_job_on_the_same_nodes_is_refused_and_told_how_to_run_beside(start_node: Start) -> None:
    first = running_pair(start_node)
    second = [start_node(rank, "--no-ray", "--", "true") for rank in (0, 1)]
    for ended in (launch.wait() for launch in second):
        assert ended.status == 12
        assert "a second job on these nodes needs a --control-port of its own" in ended.stderr
        assert "kill" not in ended.stderr
    port = {"SLIPWAY_CONTROL_PORT": str(free_port())}
    beside = [start_node(rank, "--no-ray", "--", "true", **port) for rank in (0, 1)]
    assert [launch.wait().status for launch in beside] == [0, 0]
    assert all(launch.running for launch in first)


def test_strangers_on_the_control_port_are_ignored(start_node: Start) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    worker = None
    head = start_node(0, "--no-ray", "--", "sh", "-c", "exit 7", SLIPWAY_CONTROL_PORT=str(port))
    lines = [b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b'{"hello": {"rank": 1}, "nonce": "", "proof": 5}\n', b"x" * 100_000]
    for line in lines:
        connection = connect(port)
        connection.sendall(line)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(4096):
            pass
        connection.close()
    worker = start_node(1, "--no-ray", "--", "true", SLIPWAY_CONTROL_PORT=str(port))
    told = head.wait()
    assert (told.status, worker.wait().status) == (7, 7)
    assert "Traceback" not in told.stderr


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def read_to_end(connection: socket.socket) -> bytes:
    """All that the other side sends until it hangs up. Raises TimeoutError if it does not."""
    received = b""
    with connection:
        while chunk := connection.recv(4096):
            received += chunk
    return received


STRANGE_BYTES = [
    b"[" * 900 + b"\n",
    b'{"nonce": "\\ud800", "rank": 1, "host": "\\ud800", "proof": "\\ud800"}\n',
    b'{"nonce": "' + b"0" * 64 + b'", "rank": 1, "host": "\x1b]0;owned\x07", "proof": "' + b"0" * 64 + b'"}\n',
    b"\xff" * 500 + b"\n",
]


def test_what_a_stranger_sends_is_neither_a_traceback_nor_printed(start_node: Start) -> None:
    port = free_port()
    head = start_node(0, "--no-ray", "--", "sh", "-c", "exit 7", SLIPWAY_CONTROL_PORT=str(port))
    for line in STRANGE_BYTES:
        connection = connect(port)
        connection.sendall(line)
        read_to_end(connection)
    worker = start_node(1, "--no-ray", "--", "true", SLIPWAY_CONTROL_PORT=str(port))
    told = head.wait()
    assert (told.status, worker.wait().status) == (7, 7)
    assert "Traceback" not in told.stderr
    assert "\x1b" not in told.stderr


def test_a_stranger_who_only_sends_heartbeats_is_hung_up_on(start_node: Start) -> None:
    port = free_port()
    head = start_node(0, "--no-ray", "--", "true", SLIPWAY_CONTROL_PORT=str(port))
    connection = connect(port)
    connection.settimeout(20)
    connection.sendall(b'{"beat": true}\n')
    read_to_end(connection)
    head.kill()


def test_a_thousand_idle_strangers_do_not_keep_a_node_out(start_node: Start) -> None:
    port = free_port()
    limit = {"SLIPWAY_CONTROL_PORT": str(port), "SLIPWAY_TEST_NOFILE": "300"}
    head = start_node(0, "--no-ray", "--no-preflight", "--", "sh", "-c", "exit 7", **limit)
    strangers = [connect(port) for _ in range(1000)]
    worker = start_node(1, "--no-ray", "--", "true", SLIPWAY_CONTROL_PORT=str(port))
    told = head.wait()
    for stranger in strangers:
        stranger.close()
    assert (told.status, worker.wait().status) == (7, 7)
    assert "Traceback" not in told.stderr
    assert len(told.stderr.splitlines()) < 15


def test_a_flood_of_wrong_proofs_fills_neither_the_log_nor_the_causes(start_node: Start) -> None:
    port = free_port()
    hosts = {"SLIPWAY_HOSTS": "localhost,worker-1.invalid", "SLIPWAY_CONTROL_PORT": str(port)}
    head = start_node(0, "--no-ray", "--", "true", SLIPWAY_DEADLINE="6", **hosts)
    other = start_node(1, "--no-ray", "--", "true", SLIPWAY_HOSTS="localhost,other", SLIPWAY_CONTROL_PORT=str(port))
    assert "job differs" in other.wait().stderr
    for number in range(200):
        connection = connect(port)
        claim = {"nonce": "0" * 64, "rank": 1, "host": f"n{number}", "proof": "0" * 64}
        connection.sendall(json.dumps(claim).encode() + b"\n")
        read_to_end(connection)
    told = head.wait()
    assert told.stderr.count("calls itself node 1") < 30
    assert "node 1 (worker-1.invalid): refused: job differs" in told.stderr


def test_a_fake_head_does_not_end_a_worker(start_node: Start) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)) as fake:
        worker = start_node(1, "--no-ray", "--", "true", SLIPWAY_CONTROL_PORT=str(port))
        for answer in (b'{"refused": "go away \x1b[2J"}', b'{"refused": "wrong token"}', b"[" * 900):
            connection, _ = fake.accept()
            connection.sendall(b'{"slipway": 2, "nonce": "' + b"0" * 64 + b'"}\n')
            connection.recv(4096)
            connection.sendall(answer + b"\n")
            connection.close()
    head = start_node(0, "--no-ray", "--", "sh", "-c", "exit 7", SLIPWAY_CONTROL_PORT=str(port))
    told = worker.wait()
    assert (told.status, head.wait().status) == (7, 7)
    assert "Traceback" not in told.stderr
    assert "\x1b" not in told.stderr


def connect(port: int) -> socket.socket:
    deadline = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def running_pair(start_node: Start, command: str = "echo up; exec sleep 60") -> tuple[Launch, Launch]:
    worker = start_node(1, "--no-ray", "--", "true")
    head = start_node(0, "--no-ray", "--", "sh", "-c", command)
    assert head.read_line() == "up"
    return head, worker


def test_a_lost_worker_ends_the_job(start_node: Start) -> None:
    head, worker = running_pair(start_node)
    began = time.monotonic()
    worker.signal_all(signal.SIGKILL)
    ended = head.wait()
    assert ended.status == 13
    assert "lost: connection " in ended.stderr  # closed, or reset with a heartbeat unread
    assert time.monotonic() - began < 5


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


def test_a_silent_worker_is_lost(start_node: Start) -> None:
    head, worker = running_pair(start_node)
    worker.signal_all(signal.SIGSTOP)
    ended = head.wait()
    worker.signal_all(signal.SIGCONT)
    assert ended.status == 13
    assert "lost: no heartbeat for 10 s" in ended.stderr


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("options", [(), ("--min-nodes", "1")])
def test_a_signal_to_all_nodes_at_once_leaves_the_command_its_time_and_its_workers(
    start_node: Start, number: signal.Signals, options: tuple[str, ...]
) -> None:
    grace = ("--grace", "5") if number == signal.SIGTERM else ("--grace", "0.1")
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
    head = start_node(0, "--no-ray", "--", "true", SLIPWAY_DEADLINE="3")
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
    wait_for_line(head, "it was a spare")
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
    began = time.monotonic()
    workers[3 - spare].signal_all(signal.SIGKILL)
    assert head.read_line() == "nodes 2"
    assert time.monotonic() - began < 30
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
    hosts = {"SLIPWAY_HOSTS": "localhost,worker-1.invalid,worker-2.invalid", "SLIPWAY_DEADLINE": "3"}
    worker = start_node(1, "--no-ray", "--", "true", **hosts)
    head = start_node(0, "--no-ray", "--min-nodes", "2", "--", "sh", "-c", "exit $SLIPWAY_NODE_COUNT", **hosts)
    ended = head.wait()
    assert (ended.status, worker.wait().status) == (2, 2)
    assert "continuing with 2 of 3 nodes" in ended.stderr
    assert "without node 2 (worker-2.invalid): never connected; name does not resolve" in ended.stderr


def start_mpi_task(start: Start, rank: int, directory: Path, *arguments: str) -> Launch:
    """Start a task of Hydra, which has neither head nor token."""
    numbers = {"PMI_RANK": str(rank), "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
    return start("--no-ray", *arguments, **numbers, SLIPWAY_JOB_DIR=str(directory))


def test_a_shared_directory_serves_as_meeting_place_without_token_or_head(start: Start, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = ("--control-port", str(probe.getsockname()[1]))
    worker = start_mpi_task(start, 1, tmp_path, *port, "--", "true")
    head = start_mpi_task(start, 0, tmp_path, *port, "--", "sh", "-c", "stat -c %a slipway-*.json; exit 5")
    ended = head.wait()
    assert (ended.status, worker.wait().status) == (5, 5), ended.stderr
    assert ended.stdout == "600\n"
    assert not list(tmp_path.glob("slipway-*.json"))


def test_the_note_of_a_dead_head_is_not_believed(start: Start, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = ("--control-port", str(probe.getsockname()[1]))
    old = tmp_path / "slipway-hydra.json"
    old.write_text(json.dumps({"token": "of the dead head", "heads": ["127.0.0.1"], "written": time.time()}))
    old.chmod(0o600)
    worker = start_mpi_task(start, 1, tmp_path, *port, "--", "true")
    while "the note's head has not proved itself: 127.0.0.1" not in (line := worker.read_error()):
        assert line, "launch ended"
    head = start_mpi_task(start, 0, tmp_path, *port, "--", "sh", "-c", "exit 5")
    ended = head.wait()
    assert (ended.status, worker.wait().status) == (5, 5), ended.stderr
    assert not list(tmp_path.glob("slipway-*.json"))


def test_a_note_without_a_living_head_is_an_error_at_the_deadline(start: Start, tmp_path: Path) -> None:
    # The port belongs to a stranger, which reads everything and proves nothing.
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = str(stranger.getsockname()[1])
        note = tmp_path / "slipway-hydra.json"
        note.write_text('{"token": "of the dead head", "heads": ["127.0.0.1"]}')
        note.chmod(0o600)
        worker = start_mpi_task(start, 1, tmp_path, "--deadline", "1", "--control-port", port, "--", "true")
        connection, _ = stranger.accept()
        connection.close()
        stranger.close()
        ended = worker.wait()
    assert ended.status == 12
    assert f"the head of the note {note} did not prove itself within 1 s: " in ended.stderr


JOB = {"SLURM_JOB_ID": "5"}
MOUNTS = """21 1 8:1 / / rw - ext4 /dev/sda1 rw
22 21 0:40 / {home} rw - {kind} server:/home rw
23 22 8:2 / {home}/scratch rw - xfs /dev/sdb1 rw
"""


@pytest.mark.parametrize(
    ("variables", "home", "kind", "serves"),
    [
        (JOB, "", "nfs4", True),
        (JOB, "/ann", "lustre", True),
        (JOB, "", "ext4", False),
        (JOB, "/scratch", "nfs4", False),
        ({}, "", "nfs4", False),  # no job id
        ({"JOB_ID": "5", "PE": "mpi"}, "", "gpfs", True),
    ],
)
def test_a_home_on_the_network_serves_a_schedulers_job_as_meeting_place(
    tmp_path: Path, variables: dict[str, str], home: str, kind: str, serves: bool
) -> None:
    place = Path(f"{tmp_path}/home{home}")
    place.mkdir(parents=True)
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "mountinfo").write_text(MOUNTS.format(home=tmp_path / "home", kind=kind))
    found = shared_home({**variables, "HOME": str(place)}, Tree(tmp_path))
    assert found == (place / ".slipway" if serves else None)


def test_the_folder_in_a_shared_home_is_private(tmp_path: Path) -> None:
    alone = detect({"SLIPWAY_SINGLE": "1"}, "me").allocation
    with meeting_place(tmp_path / ".slipway", alone, None, 1.0, 20_000, "me"):
        assert (tmp_path / ".slipway").stat().st_mode & 0o777 == 0o700
        assert len(list((tmp_path / ".slipway").glob("slipway-*.json"))) == 1
    assert not list((tmp_path / ".slipway").iterdir())


def test_the_note_of_the_jobs_next_start_stays(tmp_path: Path) -> None:
    alone = detect({"SLIPWAY_SINGLE": "1"}, "me").allocation
    with meeting_place(tmp_path, alone, None, 1.0, 20_000, "me"):
        newer = leave(tmp_path, alone.job_id, HeadNote("the next token", ("10.0.0.2",)))
    assert newer.exists()


def test_a_missing_note_is_an_error_at_the_deadline(start: Start, tmp_path: Path) -> None:
    ended = start_mpi_task(start, 1, tmp_path, "--deadline", "1", "--", "true").wait()
    assert ended.status == 12
    assert f"the head left no note {tmp_path}/slipway-hydra.json within 1 s" in ended.stderr


def test_a_note_that_others_can_read_is_refused(start: Start, tmp_path: Path) -> None:
    (tmp_path / "slipway-hydra.json").write_text("{}", encoding="ascii")
    ended = start_mpi_task(start, 1, tmp_path, "--", "true").wait()
    assert ended.status == 11
    assert "others can read or own " in ended.stderr


def test_an_unwritable_job_directory_is_an_error(start: Start) -> None:
    ended = start_mpi_task(start, 0, Path("/proc"), "--", "true").wait()
    assert ended.status == 11
    assert "SLIPWAY_JOB_DIR=/proc cannot be written" in ended.stderr


def test_nodes_meet_over_the_chosen_interface(start_node: Start) -> None:
    worker = start_node(1, "--no-ray", "--", "true", SLIPWAY_INTERFACE="lo")
    head = start_node(0, "--no-ray", "--", "true")
    assert (head.wait().status, worker.wait().status) == (0, 0)


def test_an_interface_without_an_address_is_an_error(start_node: Start) -> None:
    ended = start_node(1, "--no-ray", "--", "true", SLIPWAY_INTERFACE="ib7").wait()
    assert ended.status == 2
    assert "SLIPWAY_INTERFACE is ib7, which has no address here" in ended.stderr
    assert "interfaces with an address: lo" in ended.stderr
