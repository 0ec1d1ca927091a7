"""`launch train` starts its command beside Ray. Skipped without Ray, which the images have.

Except for the last tests, a small program takes the trainer's place: `launch` and Ray are real.
"""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.entrypoints.conftest import PATIENCE, Launch, Start
from tests.entrypoints.ray.conftest import SMALL, ray_directories
from tests.entrypoints.terminal import launch_in_terminal
from tests.process_table import alive, children, freeze, kill, named

pytest.importorskip("ray", reason="needs Ray, which the images have")
pytestmark = pytest.mark.usefixtures("nothing_is_left")

STAND_IN = """
import os, select, sys
descriptor = int(os.environ["SLIPWAY_READY_FD"])
early = not select.select([descriptor], [], [], 0)[0]
print("beside" if early else "after", os.environ["SLIPWAY_NODE_COUNT"], os.getpid(), flush=True)
{before}
if not os.read(descriptor, 1):
    sys.exit("Ray will not come")
import ray
ray.init(log_to_driver=False, logging_level="ERROR")
print("up with", len([node for node in ray.nodes() if node["Alive"]]), flush=True)
{after}
"""
UP = "Ray is up on"


@pytest.fixture
def stand_in(tmp_path: Path) -> "StandIn":
    return StandIn(tmp_path)


class StandIn:
    """A program in the trainer's place: it says that it has started, waits for Ray, uses it, and exits with 7."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "python_path" / "trainer" / "__main__.py"
        self._file.parent.mkdir(parents=True)
        (self._file.parent / "__init__.py").touch()  # else the trainer itself would be found
        self.write()

    def write(self, before: str = "", after: str = "sys.exit(7)") -> None:
        """Python lines before the wait and after."""
        self._file.write_text(STAND_IN.format(before=before, after=after))


def started(launch: Launch, nodes: int = 1) -> int:
    """The process id of a stand-in that has started beside Ray."""
    when, count, pid = launch.read_line().split()
    assert (when, count) == ("beside", str(nodes))
    return int(pid)


@pytest.mark.usefixtures("stand_in")
def test_a_stand_in_starts_before_ray_and_finds_it_after_its_wait(start_node: Start) -> None:
    variables = {"SLIPWAY_DEADLINE": "240"}
    worker = start_node(1, *SMALL, "train", **variables)
    head = start_node(0, *SMALL, "train", **variables)
    started(head, nodes=2)
    assert head.read_line() == "up with 2"
    ended = head.wait()
    assert (ended.status, worker.wait().status) == (7, 7)
    assert UP in ended.stderr


def test_a_stand_in_that_ends_first_ends_the_job(start_node: Start, stand_in: StandIn) -> None:
    stand_in.write(before="sys.exit(2)")
    worker = start_node(1, *SMALL, "--max-restarts", "1", "train")
    head = start_node(0, *SMALL, "--max-restarts", "1", "train")
    started(head, nodes=2)
    ended = head.wait()
    assert (ended.status, worker.wait().status) == (2, 2)
    assert UP not in ended.stderr
    assert "error" not in ended.stderr


@pytest.mark.usefixtures("stand_in")
def test_if_ray_cannot_start_its_reason_is_the_only_message(start: Start) -> None:
    launch = start("--object-store-memory", "1000", "train")
    pid = started(launch)
    ended = launch.wait()
    assert ended.status == 14
    assert "error: ray start failed with status" in ended.stderr
    assert "Traceback" not in ended.stderr.partition("error: ray start failed")[2]
    assert "killed the command" not in ended.stderr
    assert ended.stdout == ""
    assert not alive(pid)


@pytest.mark.usefixtures("stand_in")
def test_a_signal_during_the_formation_ends_both(start: Start) -> None:
    launch = start(*SMALL, "train")
    pid = started(launch)
    launch.signal(signal.SIGTERM)
    ended = launch.wait()
    assert (ended.status, ended.stdout) == (143, "")
    assert "Traceback" not in ended.stderr
    assert UP not in ended.stderr
    assert not alive(pid)


def test_the_deadline_ends_a_stand_in_that_ignores_sigterm(start: Start, stand_in: StandIn) -> None:
    stand_in.write(before="import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(100)")
    launch = start(*SMALL, "--deadline", "15", "--grace", "1", "train")
    pid = started(launch)
    stop_the_start_of_ray()
    ended = launch.wait()
    assert ended.status == 14
    assert "the deadline of 15 s passed while waiting for Ray on the head" in ended.stderr
    assert not alive(pid)


def stop_the_start_of_ray() -> None:
    """Stops `ray start` in the midst, so that Ray never comes up."""
    (directory,) = ray_directories()
    deadline = time.monotonic() + PATIENCE
    while not (processes := named("ray.scripts", str(directory))):
        assert time.monotonic() < deadline
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)


def test_a_stand_in_that_failed_before_ray_was_up_restarts(start: Start, stand_in: StandIn, tmp_path: Path) -> None:
    stand_in.write(
        before=f"made = {str(tmp_path / 'made')!r}\nif not os.path.exists(made): open(made, 'w'); sys.exit(3)"
    )
    launch = start(*SMALL, "--max-restarts", "1", "train")
    first, second = started(launch), started(launch)
    assert first != second
    assert launch.read_line() == "up with 1"
    ended = launch.wait()
    assert ended.status == 7
    assert ended.stderr.count(UP) == 1
    assert "the command failed with status 3; restart 1 of 1" in ended.stderr


@pytest.mark.usefixtures("stand_in")
def test_after_a_loss_during_the_formation_a_new_stand_in_starts(start_node: Start) -> None:
    variables = {"SLIPWAY_DEADLINE": "240", "SLIPWAY_HOSTS": "localhost,worker-1.invalid,worker-2.invalid"}
    workers = [start_node(rank, *SMALL, "--min-nodes", "2", "train", **variables) for rank in (1, 2)]
    head = start_node(0, *SMALL, "--min-nodes", "2", "train", **variables)
    first = started(head, nodes=3)
    workers[0].signal_all(signal.SIGKILL)
    assert started(head, nodes=2) != first
    assert not alive(first)
    assert head.read_line() == "up with 2"
    ended = head.wait()
    assert (ended.status, workers[1].wait().status) == (7, 7)
    assert "error" not in ended.stderr


@pytest.mark.usefixtures("stand_in")
def test_a_stand_in_ends_by_itself_if_both_processes_of_its_launch_are_killed(start: Start) -> None:
    launch = start(*SMALL, "--deadline", "100", "train")
    pid = started(launch)
    below = children(launch.pid)
    (directory,) = ray_directories()
    for number in (signal.SIGSTOP, signal.SIGKILL):  # neither of the two can react to the other's death
        for process in (launch.pid, *below):
            os.kill(process, number)
    deadline = time.monotonic() + PATIENCE
    while alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    kill(freeze(lambda: named(str(directory))))  # Ray's; nothing else knows this directory
    shutil.rmtree(directory)


@pytest.mark.usefixtures("stand_in")
def test_ctrl_c_during_the_formation_reaches_launch(tmp_path: Path) -> None:
    with launch_in_terminal(tmp_path, *SMALL, "train") as terminal:
        seen = terminal.read_until("beside")
        terminal.type(b"\x1a\x03")  # Ctrl-Z, which does nothing, and Ctrl-C
        seen += terminal.read_until(None)
    assert (terminal.status, UP in seen, "Traceback" in seen) == (130, False, False)
    assert "SIGINT" in seen


def test_a_stand_in_has_the_terminal_once_ray_is_up(stand_in: StandIn, tmp_path: Path) -> None:
    stand_in.write(after="os.execvp('sh', ['sh', '-c', 'echo got $0; exec sleep 100', input()])")
    with launch_in_terminal(tmp_path, *SMALL, "train") as terminal:
        terminal.type(b"hello\n")
        assert "got hello" in terminal.read_until("got hello")
        terminal.type(b"\x03")
        terminal.read_until(None)
    assert terminal.status == 130


def test_the_trainers_help_needs_no_ray(start: Start) -> None:
    ended = start(*SMALL, "train", "--help").wait()
    assert ended.status == 0
    assert "KEY=VALUE" in ended.stdout
    assert UP not in ended.stderr


def test_a_wrong_setting_of_the_trainer_is_refused_before_ray_is_up(start: Start) -> None:
    pytest.importorskip("pydantic")
    ended = start(*SMALL, "--max-restarts", "2", "train", "trainer.total_stepz=1").wait()
    assert ended.status == 2
    assert "trainer.total_steps" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert UP not in ended.stderr
