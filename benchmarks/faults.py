"""Injects faults into two-node jobs with real Ray; prints the table of docs/concepts/reliability.md.

    python -m benchmarks.faults [WORD ...]      # only faults whose names hold a word

Both nodes are processes of this machine. "Lost" kills everything that a node runs in the same moment, as the end of its
container or machine would; "silent" stops all of it, as a lost network looks to the other side. Needs Ray: run it with
the image's Python.
"""

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.two_nodes import new_job, start_node

PATIENCE = 60.0


class Node:
    """A `launch` process and its descendants."""

    def __init__(self, rank: int, job: dict[str, str], *command: str) -> None:
        self.popen = start_node(job, rank, "--", *command)

    def wait_until_up(self) -> None:
        assert self.popen.stdout is not None
        assert self.popen.stdout.readline() == "up\n", self.popen.communicate()

    def tree(self) -> list[int]:
        """Process ids, the one of `launch` first."""
        children: dict[int, list[int]] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                parent = int(stat.read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(stat.parent.name))
        found = [self.popen.pid]
        for pid in found:
            found += children.get(pid, [])
        return found

    def find(self, name: str) -> int:
        return next(pid for pid in self.tree() if Path(f"/proc/{pid}/comm").read_text().strip() == name)


@dataclass(frozen=True)
class Fault:
    name: str
    node: str
    """`head` or `worker`."""
    process: str
    """A process name, `launch`, or `all` for everything that the node runs."""
    number: signal.Signals

    @property
    def gone(self) -> str:
        """The node that cannot report an exit code."""
        return self.node if self.process == "all" else ""

    def inject(self, node: Node) -> None:
        match self.process:
            case "all":
                pids = node.tree()
            case "launch":
                pids = [node.popen.pid]
            case name:
                pids = [node.find(name)]
        for pid in pids:
            os.kill(pid, self.number)


FAULTS = (
    Fault("raylet of the worker killed", "worker", "raylet", signal.SIGKILL),
    Fault("raylet of the head killed", "head", "raylet", signal.SIGKILL),
    Fault("GCS killed", "head", "gcs_server", signal.SIGKILL),
    Fault("worker lost", "worker", "all", signal.SIGKILL),
    Fault("head lost", "head", "all", signal.SIGKILL),
    Fault("worker silent", "worker", "all", signal.SIGSTOP),
    Fault("head silent", "head", "all", signal.SIGSTOP),
    Fault("SIGTERM to the head", "head", "launch", signal.SIGTERM),
    Fault("SIGTERM to the worker", "worker", "launch", signal.SIGTERM),
    Fault("SIGUSR1 to the worker", "worker", "launch", signal.SIGUSR1),
    Fault("command killed", "head", "sleep", signal.SIGKILL),
)


def measure(fault: Fault) -> str:
    """A row of the table. Raises if a node does not end."""
    job = new_job() | {"SLIPWAY_DEADLINE": "120"}
    head, worker = Node(0, job, "sh", "-c", "echo up; exec sleep 300"), Node(1, job, "true")
    nodes = {"head": head, "worker": worker}
    trees: list[int] = []
    try:
        head.wait_until_up()
        time.sleep(1)  # Ray starts workers ahead, which belong to the trees, too
        trees = head.tree() + worker.tree()
        gone = nodes[fault.gone].tree() if fault.gone else []
        began = time.monotonic()
        fault.inject(nodes[fault.node])
        codes = {}
        for name, node in nodes.items():
            if name != fault.gone:
                codes[name] = str(node.popen.wait(PATIENCE))
        seconds = time.monotonic() - began
        left = [pid for pid in trees if pid not in gone and alive(pid)]
        codes |= {fault.gone: "-"} if fault.gone else {}
        cells = [fault.name, f"{seconds:.1f}", codes["head"], codes["worker"], str(len(left) or "none")]
        return "| " + " | ".join(cells) + " |"
    finally:
        for pid in trees:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        for node in nodes.values():
            node.popen.kill()
            node.popen.communicate()


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def main() -> None:
    wanted = sys.argv[1:]
    print("| fault | seconds to the last node's end | head | worker | processes left |")  # noqa: T201
    print("| --- | --- | --- | --- | --- |")  # noqa: T201
    for fault in FAULTS:
        if not wanted or any(word in fault.name for word in wanted):
            print(measure(fault), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
