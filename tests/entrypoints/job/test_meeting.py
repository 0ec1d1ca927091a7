"""Several nodes on loopback without Ray: handshakes, refusals and the common exit status."""

import re
import socket
import sys
import time
from pathlib import Path

import pytest

from tests.entrypoints.conftest import Start, listening, running_pair
from tests.serving import free_port


def test_the_command_runs_on_the_head_only_and_without_the_secret(start_node: Start) -> None:
    worker = start_node(1, "--no-ray", "--", "printenv")
    head = start_node(0, "--no-ray", "--", "printenv")
    ended = head.wait()
    printed = ended.stdout
    assert "SLIPWAY_NODE_COUNT=2" in printed, ended.stderr
    assert "open sesame" not in printed
    assert worker.wait().stdout == ""


def test_other_tasks_of_a_node_wait_and_exit_with_the_same_status(start: Start) -> None:
    port = str(free_port())
    step = {"SLURM_JOB_ID": "5", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "localhost"}
    common = {**step, "SLURM_NODEID": "0", "SLIPWAY_TOKEN": "open sesame, please", "SLIPWAY_CONTROL_PORT": port}
    head = start("--no-ray", "--", "sh", "-c", "echo up; sleep 2; exit 9", **common, SLURM_LOCALID="0")
    assert head.read_line() == "up"
    assert listening(int(port)) == {"0100007F"}  # 127.0.0.1: no task of another node comes
    task = start("--no-ray", "--", "echo", "twice", **common, SLURM_LOCALID="1")
    ended = task.wait()
    assert (ended.status, ended.stdout) == (9, "")
    assert "launch[0.1 worker]" in ended.stderr
    assert head.wait().status == 9


def test_a_task_that_connects_after_the_command_gets_its_status(start: Start) -> None:
    port = str(free_port())
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


def test_many_missing_nodes_are_named_in_a_short_message_at_the_deadline(start_node: Start) -> None:
    hosts = {"SLIPWAY_HOSTS": "localhost,worker-1.invalid,gpu-[002-899].invalid", "SLIPWAY_DEADLINE": "6"}
    head = start_node(0, "--no-ray", "--", "true", **hosts)
    other = start_node(899, "--no-ray", "--", "true", **hosts, SLIPWAY_TOKEN="open barley, not the other")
    worker = start_node(1, "--no-ray", "--", "true", **hosts)
    told, heard = head.wait(), worker.wait()
    assert (told.status, heard.status, other.wait().status) == (12, 12, 12)
    for ended in (told, heard):
        assert "898 of 900 nodes missing after 6 s" in ended.stderr
        assert "Traceback" not in ended.stderr
        caller = r"node 899 \(gpu-899\.invalid\): never connected; name does not resolve; (127\.0\.0\.1|::1) called"
        assert re.search(caller, ended.stderr)
        assert "and 878 more: gpu-[021-898].invalid" in ended.stderr
        assert len(ended.stderr) < 10_000


def test_both_sides_report_a_wrong_token(start_node: Start) -> None:
    head = start_node(0, "--no-ray", "--", "true", SLIPWAY_DEADLINE="4")
    worker = start_node(1, "--no-ray", "--", "true", SLIPWAY_TOKEN="open barley, not the other", SLIPWAY_DEADLINE="4")
    told, refused = head.wait(), worker.wait()
    assert (told.status, refused.status) == (12, 12)
    assert re.search(r"does not resolve; (127\.0\.0\.1|::1) called itself this node: wrong token", told.stderr)
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
    told = start_node(0, "--no-ray", "--", "true", **hosts).wait()
    assert told.status == 10  # at once: the deadline is longer than a test waits
    assert "this is node 0, but the head's name leads to another host: 203.0.113.7" in told.stderr
    assert "two nodes may claim rank 0" in told.stderr


def test_nodes_of_another_job_are_refused(start_node: Start) -> None:
    head = start_node(0, "--no-ray", "--", "true", SLIPWAY_DEADLINE="2")
    worker = start_node(1, "--no-ray", "--", "true", SLIPWAY_HOSTS="localhost,other")
    assert "job differs" in worker.wait().stderr
    assert "refused: job differs" in head.wait().stderr


@pytest.mark.parametrize(
    ("head", "cause"), [("localhost", "connection refused"), ("head.invalid", "its name does not resolve")]
)
def test_a_worker_without_a_head_reports_the_cause(start_node: Start, head: str, cause: str) -> None:
    ended = start_node(1, "--no-ray", "--", "true", SLIPWAY_DEADLINE="1", SLIPWAY_HOSTS=f"{head},worker-1").wait()
    assert ended.status == 12
    assert re.search(f"within 1 s: .*{cause}", ended.stderr)  # of each address, where the name has several
    assert ("its name resolves to 127.0.0.1, which is this node itself" in ended.stderr) == (head == "localhost")


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


def test_nodes_meet_over_the_chosen_interface(start_node: Start) -> None:
    worker = start_node(1, "--no-ray", "--", "true", SLIPWAY_INTERFACE="lo")
    head = start_node(0, "--no-ray", "--", "true")
    assert (head.wait().status, worker.wait().status) == (0, 0)


def test_an_interface_without_an_address_is_an_error(start_node: Start) -> None:
    ended = start_node(1, "--no-ray", "--", "true", SLIPWAY_INTERFACE="ib7").wait()
    assert ended.status == 2
    assert "SLIPWAY_INTERFACE is ib7, which has no address here" in ended.stderr
    assert "interfaces with an address: lo" in ended.stderr


LAUNCH = f"{sys.executable} -m entrypoints"


def test_a_launch_in_the_command_is_none_of_the_nodes(start_node: Start) -> None:
    worker = start_node(1, "--no-ray", "--", "true")
    script = f"{LAUNCH} --no-ray -- true; echo $?; RAY_ADDRESS=127.0.0.1:1 {LAUNCH} -- true; echo $?"
    head = start_node(0, "--no-ray", "--", "sh", "-c", script).wait()
    assert (head.status, worker.wait().status) == (0, 0), head.stderr
    assert head.stdout == "10\n16\n"
    assert "error: this is the command of a launch on 2 nodes, which started no Ray" in head.stderr
    assert "RAY_ADDRESS is 127.0.0.1:1, but no Ray cluster answers there: connection refused" in head.stderr


@pytest.mark.parametrize("options", [["--single"], ["--nodes", "1"], ["--hosts", "here", "--hostname", "here"]])
def test_a_launch_in_the_command_of_one_node_runs_there_too(start: Start, options: list[str]) -> None:
    ended = start(*options, "--no-ray", "--", "sh", "-c", f"{LAUNCH} --no-ray -- echo inside").wait()
    assert (ended.status, ended.stdout) == (0, "inside\n"), ended.stderr
