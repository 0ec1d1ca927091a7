"""How long a cluster of two nodes takes to form: `launch` beside `ray start` by hand, for measured/tables.md.

    python -m benchmarks.formation [REPEATS]

Both nodes are processes of this machine, with the same resources on both sides; the two sides take turns. `launch`:
from the start of the last node until the command runs, when all nodes have met, are checked, and Ray itself says that
all are alive. By hand: `ray start --head`, `ray start --address=…` and a program that counts the nodes alive, one after
the other without a pause. Needs Ray: run it with the image's Python.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

from benchmarks.two_nodes import LAUNCH, REPOSITORY, SMALL, free_port, new_job, start_node

RAY = (sys.executable, "-m", "ray.scripts.scripts", "start", "--node-ip-address=127.0.0.1", *SMALL)
PATIENCE = 120.0
COUNT = """
import ray, sys, time
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
while sum(node["Alive"] for node in ray.nodes()) < 2:
    time.sleep(0.1)
"""


def by_launch(*options: str) -> float:
    """Seconds from the last node's start to the command's first line."""
    job, nodes = new_job(), []
    for rank in (0, 1):
        began = time.monotonic()
        nodes.append(start_node(job, rank, *options, "--", "echo", "up"))
    assert nodes[0].stdout is not None
    first = nodes[0].stdout.readline()
    seconds = time.monotonic() - began
    ends = [node.communicate(timeout=PATIENCE) for node in nodes]
    assert first == "up\n", ends
    return seconds


def by_hand(*options: str) -> float:
    """The same with Ray's own commands, under a `launch` that ends the processes they leave."""
    line = [*LAUNCH, "--no-ray", "--", sys.executable, "-m", "benchmarks.formation", "by-hand", *options]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "RAY_AUTH_MODE": "disabled"}
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return float(json.loads(done.stdout))


def start_by_hand(*options: str) -> float:
    address = f"127.0.0.1:{free_port()}"
    port = address.rpartition(":")[2]
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        began = time.monotonic()
        for command in (
            [*RAY, "--head", f"--port={port}", f"--temp-dir={directory}", *options],
            [*RAY, f"--address={address}"],
            [sys.executable, "-c", COUNT, address],
        ):
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            assert done.returncode == 0, done.stdout
        return time.monotonic() - began


def main() -> None:
    if sys.argv[1:2] == ["by-hand"]:
        print(json.dumps(start_by_hand(*sys.argv[2:])))  # noqa: T201
        return
    repeats = int(sys.argv[1]) if sys.argv[1:] else 5
    print("| | `launch`, s | `ray start` by hand, s | ratio of medians |\n| --- | --- | --- | --- |")  # noqa: T201
    without = ("--include-dashboard=false", "--no-monitor")
    for name, ours, theirs in (("without dashboard", (), without), ("with dashboard", ("--dashboard",), ())):
        pairs = [(by_launch(*ours), by_hand(*theirs)) for _ in range(repeats)]
        cells = [
            f"{statistics.median(side):.1f} ({min(side):.1f} to {max(side):.1f})" for side in zip(*pairs, strict=True)
        ]
        ratio = statistics.median(pair[0] for pair in pairs) / statistics.median(pair[1] for pair in pairs)
        print(f"| {name} | {' | '.join(cells)} | {ratio:.2f} |", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
