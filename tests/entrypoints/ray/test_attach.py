"""Commands beside a running job: Ray's state, submitted jobs, the dashboard, debuggers."""

import importlib.util
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from entrypoints.errors import NoClusterError
from entrypoints.ray.attach import find_note, leave_note
from entrypoints.ray.directory import NodeDirectory
from tests.entrypoints.conftest import PATIENCE, REPOSITORY, Launch, Start

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray, which the images have")
SMALL = ("--num-cpus", "1", "--num-gpus", "0", "--object-store-memory", str(100 * 1024**2))
BREAKPOINT = """
import ray
ray.init(log_to_driver=False)
@ray.remote(runtime_env={"env_vars": {"RAY_DEBUG": "legacy"}})
def multiply(a, b):
    product = a * b
    breakpoint()
    return product
print("returned", ray.get(multiply.remote(6, 7)))
"""
EXCEPTION = """
import ray
ray.init(log_to_driver=False)
@ray.remote(runtime_env={"env_vars": {"RAY_DEBUG_POST_MORTEM": "1"}}, max_retries=0)
def divide(a, b):
    return a / b
ray.get(divide.remote(1, 0))
"""


def leave_cluster(root: Path, job: str = "1", **environment: str) -> NodeDirectory:
    """The directory of a launch that lives as long as this test, with its note."""
    directory = NodeDirectory("slipway-ray-", root)
    leave_note(directory.path, job, {"RAY_ADDRESS": "n0:6379", **environment})
    return directory


def assert_nothing_is_found(root: Path) -> None:
    with pytest.raises(NoClusterError, match="no cluster of yours runs on this node"):
        find_note(None, root)


def test_a_cluster_is_found_by_the_plain_job_id(tmp_path: Path) -> None:
    kept = [
        leave_cluster(tmp_path, job, RAY_ADDRESS=f"n{number}:6379")
        for number, job in enumerate(("41.0", "42+1.0", "f2ab"))
    ]
    assert find_note("42", tmp_path).environment == {"RAY_ADDRESS": "n1:6379"}
    assert find_note("f2ab", tmp_path).environment == {"RAY_ADDRESS": "n2:6379"}
    with pytest.raises(NoClusterError, match="several clusters of yours run on this node: ") as caught:
        find_note(None, tmp_path)
    assert all(job in caught.value.message for job in ("41", "42", "f2ab"))
    with pytest.raises(NoClusterError, match="no cluster of job 7 runs on this node"):
        find_note("7", tmp_path)
    for directory in kept:
        directory.remove()


def test_a_note_and_its_directory_are_private(tmp_path: Path) -> None:
    directory = leave_cluster(tmp_path).path
    assert directory.stat().st_mode & 0o777 == 0o700
    assert (directory / "attach.json").stat().st_mode & 0o777 == 0o600


def test_a_note_expires_with_its_launch(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from entrypoints.ray.attach import leave_note;"
        "from entrypoints.ray.directory import NodeDirectory;"
        "directory = NodeDirectory('slipway-ray-', Path(sys.argv[1]));"
        "leave_note(directory.path, '1', {'RAY_ADDRESS': 'n0:6379'}); print('left', flush=True); sys.stdin.read()"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    line = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(line, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as launch:
        assert launch.stdout is not None
        assert launch.stdout.readline() == "left\n"
        assert find_note(None, tmp_path).job_id == "1"
        launch.kill()
    assert_nothing_is_found(tmp_path)


@pytest.mark.parametrize(
    "environment", [{"LD_PRELOAD": "/tmp/evil.so"}, {"PATH": "/tmp"}, {"RAY_AUTH_TOKEN": "a\nb"}, {"RAY_AUTH_MODE": 5}]
)
def test_a_note_sets_nothing_but_known_variables_to_plain_text(tmp_path: Path, environment: dict[str, Any]) -> None:
    leave_cluster(tmp_path, **environment)
    assert_nothing_is_found(tmp_path)


BAD_ADDRESSES = [
    f'{{"job_id": "1", "environment": {{"RAY_ADDRESS": "n0:1"}}, "addresses": {addresses}}}'
    for addresses in ("5", "[5]", '["a\\nb"]')
]


@pytest.mark.parametrize(
    "text", ["", "[]", "3", "{}", "[" * 10_000, '{"job_id": "1", "environment": {}}', "\ud800", *BAD_ADDRESSES]
)
def test_a_malformed_note_is_no_note(tmp_path: Path, text: str) -> None:
    note = leave_cluster(tmp_path).path / "attach.json"
    note.write_bytes(text.encode(errors="surrogatepass"))
    assert_nothing_is_found(tmp_path)


@pytest.mark.parametrize(("name", "mode"), [("", 0o755), ("attach.json", 0o644)])
def test_what_others_may_read_is_ignored(tmp_path: Path, name: str, mode: int) -> None:
    (leave_cluster(tmp_path).path / name).chmod(mode)
    assert_nothing_is_found(tmp_path)


def test_links_are_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    theirs = leave_cluster(elsewhere).path
    (tmp_path / "slipway-ray-linked-directory").symlink_to(theirs)
    ours = leave_cluster(tmp_path).path
    (ours / "attach.json").unlink()
    (ours / "attach.json").symlink_to(theirs / "attach.json")
    assert_nothing_is_found(tmp_path)


def test_a_pipe_in_the_place_of_a_note_does_not_block(tmp_path: Path) -> None:
    note = leave_cluster(tmp_path).path / "attach.json"
    note.unlink()
    os.mkfifo(note, 0o600)
    assert_nothing_is_found(tmp_path)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("given_away", ["directory", "note"])
def test_another_users_note_is_ignored(tmp_path: Path, given_away: str) -> None:
    directory = leave_cluster(tmp_path).path
    os.chown(directory if given_away == "directory" else directory / "attach.json", 65_534, 65_534)
    assert_nothing_is_found(tmp_path)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_a_stranger_who_swaps_directories_never_gets_a_variable_in(tmp_path: Path) -> None:
    # The stranger exchanges two names as fast as it can: its own note, and a link to a directory of this user.
    tmp_path.chmod(0o777)
    leave_cluster(tmp_path, RAY_AUTH_TOKEN="ours")
    swap = """
import ctypes, json, os, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
root, ours = sys.argv[1:]
theirs, link = f"{root}/slipway-ray-swapped", f"{root}/other"
os.mkdir(theirs, 0o700)
with open(f"{theirs}/attach.json", "w", opener=lambda p, f: os.open(p, f, 0o600)) as note:
    json.dump({"job_id": "1", "environment": {"RAY_ADDRESS": "n0:6379", "RAY_AUTH_TOKEN": "theirs"}}, note)
open(f"{theirs}/lock", "w").close()
os.symlink(ours, link)
exchange = ctypes.CDLL(None).renameat2
print("ready", flush=True)
while True:
    exchange(-100, theirs.encode(), -100, link.encode(), 2)
"""
    ours = next(tmp_path.glob("slipway-ray-*"))
    line = [sys.executable, "-c", swap, str(tmp_path), str(ours)]
    for parent in tmp_path.parents[:3]:
        parent.chmod(parent.stat().st_mode | 0o011)  # pytest's directories are private
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as stranger:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "ready\n"
        tokens = {find_note(None, tmp_path).environment["RAY_AUTH_TOKEN"] for _ in range(2_000)}
        stranger.kill()
    assert tokens == {"ours"}


def test_attach_without_a_cluster_says_where_to_run_it(start: Start) -> None:
    ended = start("attach", "--job", "none-such", "--", "true").wait()
    assert ended.status == 16
    assert "error: no cluster of job none-such runs on this node" in ended.stderr
    assert "hint: run it as the job's user in a container of the job" in ended.stderr


def test_a_dashboard_needs_host_and_port(start: Start) -> None:
    assert "'8265' is not HOST:PORT" in start("--dashboard-address", "8265", "--", "true").wait().stderr


PROXY = {"http_proxy": "http://127.0.0.1:9", "NO_PROXY": "example.org"}
"""A proxy that answers nothing: every request to the job must go past it."""


class Job:
    """Two nodes with a dashboard, whose command waits."""

    def start(self, *command: str) -> "subprocess.Popen[str]":
        line = [sys.executable, "-m", "entrypoints", "attach", "--", *command]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, **PROXY, "PATH": path, "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1"}
        return subprocess.Popen(
            line, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def run(self, *command: str) -> str:
        """Both streams of a command beside the job."""
        process = self.start(*command)
        output, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, output
        return output

    def value(self, name: str) -> str:
        return self.run("printenv", name).strip()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    variables = {
        "SLIPWAY_HOSTS": "localhost,worker-1.invalid",
        "SLIPWAY_CONTROL_PORT": port,
        "SLIPWAY_TOKEN": "a secret of this test",
        **PROXY,
    }
    options = (*SMALL, "--dashboard", "--ray-debugger-external", "--deadline", "240")
    directory = tmp_path_factory.mktemp("job")
    worker = Launch([*options, "--", "true"], {**variables, "SLIPWAY_NODE_RANK": "1"}, directory)
    head = Launch(
        [*options, "--", "sh", "-c", "printenv no_proxy; exec sleep 600"],
        {**variables, "SLIPWAY_NODE_RANK": "0"},
        directory,
    )
    assert head.read_line() == "example.org,localhost,127.0.0.1,::1", head.wait().stderr
    yield Job()
    for launch in (head, worker):
        launch.signal(signal.SIGTERM)
        launch.wait()


@needs_ray
def test_ray_status_lists_both_nodes(job: Job) -> None:
    told = job.run("ray", "status")
    assert told.count("1 node_") == 2, told
    assert "0.0/2.0 CPU" in told


@needs_ray
def test_a_job_is_submitted_and_its_logs_are_read(job: Job) -> None:
    address = f"--address={job.value('RAY_API_SERVER_ADDRESS')}"
    train = ("python3", "-m", "trainer", "config", "actor.micro_batch_size")
    submitted = job.run("ray", "job", "submit", address, "--submission-id", "first", "--", *train)
    assert "Job 'first' succeeded" in submitted
    assert "actor.micro_batch_size=" in job.run("ray", "job", "logs", address, "first")
    assert "SUCCEEDED" in job.run("ray", "job", "list", address)
    assert "'first' succeeded" in job.run("ray", "job", "status", address, "first")


@needs_ray
def test_the_dashboard_asks_for_the_token(job: Job) -> None:
    url = f"{job.value('RAY_API_SERVER_ADDRESS')}/nodes?view=summary"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(url, timeout=PATIENCE)
    wrong = urllib.request.Request(url, headers={"Authorization": f"Bearer {'0' * 64}"})
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(wrong, timeout=PATIENCE)
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {job.value('RAY_AUTH_TOKEN')}"})
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        assert len(json.load(answer)["data"]["summary"]) == 2


@needs_ray
def test_ray_debug_stops_at_a_breakpoint_on_any_node(job: Job, tmp_path: Path) -> None:
    (tmp_path / "multiply.py").write_text(BREAKPOINT)
    driver = job.start("python", str(tmp_path / "multiply.py"))
    debugger = debugger_at_a_breakpoint(job, "ray::multiply")
    say(debugger, "p product")
    assert "42" in read_until(debugger, "(Pdb) ")
    say(debugger, "continue")
    output, _ = driver.communicate(timeout=PATIENCE)
    debugger.kill()
    debugger.communicate()
    assert "returned 42" in output


def debugger_at_a_breakpoint(job: Job, name: str) -> "subprocess.Popen[str]":
    """`ray debug`, attached. Ray lists a breakpoint before it listens there, so the first one may be refused."""
    for attempt in range(3):
        debugger = job.start("ray", "debug")
        seen = ""
        while name not in seen.rpartition("Active breakpoints:")[2]:
            seen += read_until(debugger, "press enter to refresh: ")
            say(debugger, "")
        read_until(debugger, "press enter to refresh: ")
        say(debugger, "0")
        try:
            read_until(debugger, "(Pdb) ")
        except EOFError as error:
            debugger.communicate()
            if "ConnectionRefusedError" not in str(error) or attempt == 2:
                raise
        else:
            break
    return debugger


def read_until(process: "subprocess.Popen[str]", words: str) -> str:
    """The output up to this text, which may be within a line. Raises EOFError if the process ends before."""
    assert process.stdout is not None
    seen = ""
    while not seen.endswith(words):
        letter = process.stdout.read(1)
        if not letter:
            raise EOFError(f"it ended: {seen}")
        seen += letter
    return seen


def say(process: "subprocess.Popen[str]", line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


@needs_ray
@pytest.mark.skipif(
    importlib.util.find_spec("debugpy") is None, reason="needs debugpy, which images built for debugging have"
)
def test_an_exception_stops_for_rays_distributed_debugger(job: Job, tmp_path: Path) -> None:
    (tmp_path / "divide.py").write_text(EXCEPTION)
    driver = job.start("python", str(tmp_path / "divide.py"))
    worker = wait_for(lambda: stopped_worker(job))
    assert driver.poll() is None
    with DebugClient((worker["ip"], worker["debugger_port"])) as client:
        assert client.exception() == ("ZeroDivisionError", "division by zero")
    output, _ = driver.communicate(timeout=PATIENCE)
    assert "ZeroDivisionError" in output


def stopped_worker(job: Job) -> dict[str, Any] | None:
    """The worker that waits for a debugger, from Ray's state API, or None."""
    listed = job.run("ray", "list", "workers", "--detail", "--format=json")
    workers = json.loads(listed[listed.index("[") :])
    return next((worker for worker in workers if worker["num_paused_threads"]), None)


def wait_for(look: Callable[[], Any]) -> Any:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if value := look():
            return value
        time.sleep(0.5)
    pytest.fail(f"nothing came within {PATIENCE:g} s")


class DebugClient:
    """The part of the Debug Adapter Protocol with which an editor attaches:
    https://microsoft.github.io/debug-adapter-protocol/specification.
    """

    def __init__(self, address: tuple[str, int]) -> None:
        self._socket = socket.create_connection(address, PATIENCE)
        self._stream = self._socket.makefile("rwb")
        self._numbers = itertools.count(1)

    def __enter__(self) -> "DebugClient":
        self._send("initialize", adapterID="test")
        self._wait("response", "initialize")
        self._send("attach", justMyCode=False)
        self._wait("event", "initialized")
        self._send("setExceptionBreakpoints", filters=["uncaught"])
        self._send("configurationDone")
        return self

    def __exit__(self, *_: object) -> None:
        self._send("disconnect", terminateDebuggee=False)
        self._stream.close()
        self._socket.close()

    def exception(self) -> tuple[str, str]:
        """Class and message of the exception at which the program stopped."""
        thread = self._wait("event", "stopped")["threadId"]
        self._send("exceptionInfo", threadId=thread)
        answer = self._wait("response", "exceptionInfo")
        return answer["exceptionId"].split()[0].rpartition(".")[2], answer["description"]

    def _send(self, command: str, **arguments: Any) -> None:
        message = {"seq": next(self._numbers), "type": "request", "command": command, "arguments": arguments}
        body = json.dumps(message).encode()
        self._stream.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        self._stream.flush()

    def _wait(self, kind: str, name: str) -> dict[str, Any]:
        while True:
            length = 0
            while header := self._stream.readline().strip():
                length = int(header.rpartition(b" ")[2])
            message = json.loads(self._stream.read(length))
            if (message["type"], message.get("command") or message.get("event")) == (kind, name):
                return dict(message.get("body") or {})
