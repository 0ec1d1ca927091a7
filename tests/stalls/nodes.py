"""Stalls nodes, each a container: `python -m tests.stalls.nodes --record FILE`, with a Docker engine.

Ray runs on one network, collectives on another. Beside the faults of `python -m tests.stalls`, an injection takes
networks away from a node, freezes it, or limits its processor time. One cluster serves many injections. The options
and the file are those of `python -m tests.stalls`.
"""

import json
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Any

from tests.chaos.injection import NotStartedError
from tests.stalls.faults import Injection
from tests.stalls.rank import NETWORK
from tests.stalls.records import Record
from tests.stalls.running import options, run

MARK = "stalls: "  # of lines from `tests.stalls.inside`; Ray writes others
PORT = 6379
ROOT = Path(__file__).parents[2]
STARTING, ANSWERING = 300.0, 240.0  # seconds for a cluster to start, and for an injection
FIRST = 10  # last number of the head's addresses
SLOW = "0.1"  # processors of a slow node


def docker(*arguments: str) -> None:
    """Raises NotStartedError."""
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise NotStartedError(f"docker {' '.join(arguments)}: {done.stderr.strip()}")


def remove(*arguments: str) -> None:
    subprocess.run(["docker", *arguments], capture_output=True)


class Nodes:
    """A Ray cluster of containers with the program of `tests.stalls.inside` on its head."""

    def __init__(self, name: str, count: int, head: "subprocess.Popen[str]", subnets: dict[str, str]) -> None:
        self._name, self._count, self._subnets = name, count, subnets
        self._head = head
        self._said: Queue[tuple[str, Any]] = Queue()
        Thread(target=self._read, daemon=True).start()
        self._hear("ready", STARTING)

    def inject(self, injection: Injection) -> Record:
        """Raises NotStartedError."""
        self._tell(json.dumps({"fault": injection.fault.name, "seed": injection.seed}))
        if injection.fault.at != "node":
            return Record(**self._hear("record", ANSWERING))
        self._hear("start", ANSWERING)
        time.sleep(injection.after)
        self._tell("begun")
        self._begin(injection.fault.act, injection.rank)
        word, value = self._next(ANSWERING)
        self._end(injection.fault.act, injection.rank)
        while word == "end":
            word, value = self._next(ANSWERING)
        if word != "record":
            raise NotStartedError(f"{word}: {value}")
        return Record(**value)

    def _begin(self, act: str, rank: int) -> None:
        container = f"{self._name}-{rank}"
        if act == "freeze":
            docker("pause", container)
        elif act == "slow down":
            docker("update", "--cpus", SLOW, container)
        else:
            for network in self._cut(act):
                docker("network", "disconnect", network, container)

    def _end(self, act: str, rank: int) -> None:
        container = f"{self._name}-{rank}"
        if act == "freeze":
            docker("unpause", container)
        elif act == "slow down":
            docker("update", "--cpus", str(os.cpu_count()), container)
        else:
            for network in self._cut(act):
                docker("network", "connect", "--ip", f"{self._subnets[network]}{FIRST + rank}", network, container)

    def _cut(self, act: str) -> list[str]:
        ray, collectives = self._subnets
        return {"cut the collectives' network": [collectives], "cut all networks": [ray, collectives]}[act]

    def _tell(self, line: str) -> None:
        assert self._head.stdin is not None
        try:
            self._head.stdin.write(line + "\n")
            self._head.stdin.flush()
        except BrokenPipeError as error:
            raise NotStartedError("the job has ended") from error

    def _hear(self, expected: str, seconds: float) -> Any:
        word, value = self._next(seconds)
        if word != expected:
            raise NotStartedError(f"{word}: {value}")
        return value

    def _next(self, seconds: float) -> tuple[str, Any]:
        try:
            return self._said.get(timeout=seconds)
        except Empty:
            return "no answer", f"for {seconds:.0f} s"

    def _read(self) -> None:
        assert self._head.stdout is not None
        for line in self._head.stdout:
            if line.startswith(MARK):
                word, value = json.loads(line.removeprefix(MARK))
                self._said.put((word, value))
        self._said.put(("the job has ended", self._head.wait()))


@contextmanager
def started(image: str, stall_seconds: float, count: int) -> Iterator[Nodes]:
    """Raises NotStartedError."""
    name = f"slipway-stalls-{secrets.token_hex(3)}"
    subnets = {f"{name}-{which}": f"10.{random.randrange(128, 250)}.{random.randrange(256)}." for which in "ab"}
    with ExitStack() as stack, tempfile.TemporaryDirectory() as shared:
        Path(shared).chmod(0o777)
        for network, subnet in subnets.items():
            docker("network", "create", "--subnet", f"{subnet}0/24", network)
            stack.callback(remove, "network", "rm", network)
        (ray, ray_subnet), (collectives, subnet) = subnets.items()
        for number in range(count):
            container, address = f"{name}-{number}", f"{ray_subnet}{FIRST + number}"
            role = f"--head --port {PORT} --include-dashboard false"
            if number:
                role = f"--address {ray_subnet}{FIRST}:{PORT}"
            ray_start = f"ray start {role} --node-ip-address {address} --num-cpus 2 --object-store-memory 100000000"
            variables = {"PYTHONPATH": "/src", "RAY_AUTH_MODE": "disabled", NETWORK: subnet}
            flags = [part for item in variables.items() for part in ("-e", "=".join(item))]
            docker(
                *("create", "--init", "--name", container, "--network", ray, "--ip", address, "--shm-size", "1g"),
                *("--tmpfs", "/full:size=8m", *flags, "-v", f"{ROOT}:/src:ro", "-v", f"{shared}:/shared"),
                *("--entrypoint", "sh", image, "-c", f"until {ray_start} --block; do sleep 1; done"),
            )
            stack.callback(remove, "rm", "-f", container)
            docker("network", "connect", "--ip", f"{subnet}{FIRST + number}", collectives, container)
            docker("start", container)
        command = ["docker", "exec", "-i", "-e", f"RAY_ADDRESS={ray_subnet}{FIRST}:{PORT}", f"{name}-0"]
        head = subprocess.Popen(
            [*command, "python", "-m", "tests.stalls.inside", str(count), str(stall_seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        stack.callback(head.wait)
        stack.callback(head.kill)
        yield Nodes(name, count, head, subnets)


def main() -> int:
    parser = options("tests.stalls.nodes", __doc__, "nodes")
    parser.add_argument("--image", default="slipway:cpu")
    given = parser.parse_args()
    if not given.record:
        parser.error("--record FILE is needed")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # containers are removed
    places = ("node", "rank", "controller")
    return run(given, places, "nodes", partial(started, given.image, given.stall_seconds), Nodes.inject)


if __name__ == "__main__":
    sys.exit(main())
