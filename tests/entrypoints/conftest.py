"""Real `launch` processes, on loopback."""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from entrypoints.wire.network import is_own
from tests.serving import free_port

REPOSITORY = Path(__file__).parents[2]
PATIENCE = 240.0
"""Seconds for each wait; an idle machine needs a tenth."""


@dataclass(frozen=True)
class Ended:
    status: int
    stdout: str
    stderr: str


class Launch:
    """One running `launch`."""

    def __init__(self, arguments: list[str], variables: Mapping[str, str], directory: Path) -> None:
        kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "entrypoints", *arguments],
            env={**kept, "PYTHONPATH": python_path(directory), **variables},
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=_limit(int(variables["SLIPWAY_TEST_NOFILE"])) if "SLIPWAY_TEST_NOFILE" in variables else None,
        )

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def running(self) -> bool:
        return self._popen.poll() is None

    def signal_all(self, number: signal.Signals) -> None:
        """Signal both processes of the launch at once, as if the machine had the problem."""
        os.killpg(self._popen.pid, number)

    def signal(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def read_line(self) -> str:
        """The next line on stdout; waits until the command has printed it, and fails if the launch ends instead."""
        assert self._popen.stdout is not None
        line = self._popen.stdout.readline()
        assert line, f"no further line on stdout: {self.wait()}"
        return line.strip()

    def read_error(self) -> str:
        """The next line on stderr."""
        assert self._popen.stderr is not None
        return self._popen.stderr.readline()

    def wait(self) -> Ended:
        stdout, stderr = self._popen.communicate(timeout=PATIENCE)
        return Ended(self._popen.returncode, stdout, stderr)

    def kill(self) -> None:
        if self._popen.poll() is None:
            self._popen.kill()
        self._popen.communicate()


def python_path(directory: Path) -> str:
    """PYTHONPATH of a launch started in this directory: a test's `python_path/` there comes before the project."""
    return f"{directory / 'python_path'}:{REPOSITORY}"


def _limit(files: int) -> Callable[[], None]:
    """A function that limits the child's open files."""
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))


Start = Callable[..., Launch]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start `launch ARGUMENTS` with these variables and no others."""
    running: list[Launch] = []

    def start_one(*arguments: str, **variables: str) -> Launch:
        running.append(Launch(list(arguments), variables, tmp_path))
        return running[-1]

    yield start_one
    for launch in running:
        launch.kill()


@pytest.fixture
def ipv6() -> None:
    """For tests over ::1; skips them where the kernel has no IPv6."""
    if not is_own("::1"):
        pytest.skip("this host has no ::1")


@pytest.fixture
def start_node(start: Start) -> Start:
    """Start one node of a job on loopback: `start_node(rank, *arguments, **variables)`."""
    port = str(free_port())

    def start_one(rank: int, *arguments: str, **variables: str) -> Launch:
        job = {"SLIPWAY_HOSTS": "localhost,worker-1.invalid", "SLIPWAY_NODE_RANK": str(rank)}
        job |= {"SLIPWAY_CONTROL_PORT": port, "SLIPWAY_TOKEN": "open sesame, please", "SLIPWAY_DEADLINE": "40"}
        return start(*arguments, **{**job, **variables})

    return start_one


def listening(port: int) -> set[str]:
    """The addresses of this host at which somebody listens on a port, as the kernel's tables write them."""
    tables = (Path("/proc/net", name).read_text().splitlines()[1:] for name in ("tcp", "tcp6"))
    rows = [line.split() for table in tables for line in table]
    local = (row[1].split(":") for row in rows if row[3] == "0A")
    return {address for address, number in local if int(number, 16) == port}


def running_pair(start_node: Start, command: str = "echo up; exec sleep 60") -> tuple[Launch, Launch]:
    worker = start_node(1, "--no-ray", "--", "true")
    head = start_node(0, "--no-ray", "--", "sh", "-c", command)
    assert head.read_line() == "up"
    return head, worker
