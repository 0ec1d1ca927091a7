"""Seconds that many nodes take to meet: the real head and real handshakes over loopback, without Ray.

    python benchmarks/meeting.py [NODES ...]

The head runs in this process. The workers are tasks of one other process, started together as a scheduler would: each
resolves the head, connects, proves that it knows the token, says what its fabric is, and then waits for the end. Timed
are the start of the workers until the head has compared all fabrics, and the command's end until every worker knows the
status. Run it in ci/setup's .venv.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import time
from collections.abc import Coroutine, Sequence
from types import SimpleNamespace
from typing import Any

from entrypoints.environments import Allocation
from entrypoints.environments.process_view import ProcessView, rank_of
from entrypoints.host.network.fabric import odd_ones
from entrypoints.hostlist import expand
from entrypoints.job.meeting import Meeting
from entrypoints.options import Options
from entrypoints.wire.handshake import introduce
from entrypoints.wire.reach import reach_head

SIZES = (2, 8, 64, 256, 1024)
PORT = 20_999
TOKEN = "a secret of this benchmark"
FABRIC = {
    "kind": "infiniband",
    "hcas": [f"mlx5_{rail}" for rail in range(8)],
    "gid_index": [],
    "mtu": [4092],
    "rate": [400.0],
}


def hello(rank: int, count: int) -> dict[str, Any]:
    return {
        **{"rank": rank, "local_rank": 0, "hostname": f"n{rank}", "cpus": 1, "gpus": 8, "fabric": FABRIC, "unfit": []},
        **{
            "job_id": "bench",
            "node_count": count,
            "python": "3",
            "ray": "2",
            "slipway": "0",
            "image": None,
            "tls": False,
            "request": None,
            "clock": time.time(),
        },
    }


class HeadNode:
    """The part of a node that the meeting uses; nothing here may fail."""

    def __init__(self, count: int) -> None:
        variables = {"SLIPWAY_HOSTS": f"n[0-{count - 1}]"}
        self.allocation = Allocation(
            environment="explicit", job_id="bench", node_count=count, node_rank=0, head="localhost", variables=variables
        )
        self.options = Options(command=("true",), control_port=PORT, deadline=120)
        self.control_port, self.hostname, self.name = PORT, "n0", "node 0 (n0)"
        self._deadline = time.monotonic() + self.options.deadline

    @property
    def seconds_left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def fail(self, error: Exception) -> None:
        raise error

    def certify(self, _request: object) -> None:
        """No node has asked for a certificate."""

    def run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        self._background = asyncio.create_task(work)


async def lead(count: int, start_workers: Any) -> dict[str, float]:
    node = HeadNode(count)
    meeting = Meeting(node, TOKEN, "launch", hello(0, count))  # type: ignore[arg-type]
    await meeting.open()
    began = time.monotonic()
    workers = start_workers()
    peers = await meeting.gather()
    odd = odd_ones({node.name: FABRIC} | {peer.name: peer.fabric for peer in peers})
    met = time.monotonic() - began
    assert len(peers) == count - 1
    assert odd == []
    began = time.monotonic()
    await meeting.end(0, "")
    ended = time.monotonic() - began
    await asyncio.to_thread(workers.join)
    assert workers.exitcode == 0
    return {"nodes": count, "meet": round(met, 3), "end": round(ended, 3)}


def follow_all(count: int) -> None:
    """Runs all workers as tasks of one process; exits with 1 if one of them does not receive the status."""
    raise_limit()

    async def follow(rank: int) -> None:
        hosts = expand(f"n[0-{count - 1}]")
        assert rank_of(ProcessView(variables={}, hostname=f"n{rank}"), hosts, "hosts") == rank
        channel = await reach_head(["localhost"], PORT, TOKEN, rank=rank, hostname=f"n{rank}", within=120, source=None)
        await introduce(channel, hello(rank, count))
        while "exit" not in await channel.receive():
            pass
        await channel.close()

    async def all_of_them() -> None:
        await asyncio.gather(*(follow(rank) for rank in range(1, count)))

    asyncio.run(all_of_them())


def raise_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def start_workers(count: int) -> SimpleNamespace:
    process = multiprocessing.get_context("fork").Process(target=follow_all, args=(count,))
    process.start()
    return process  # type: ignore[return-value]


def measure(sizes: Sequence[int]) -> list[dict[str, float]]:
    raise_limit()
    return [asyncio.run(lead(count, lambda count=count: start_workers(count))) for count in sizes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("nodes", type=int, nargs="*", default=list(SIZES))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = measure(arguments.nodes)
    if arguments.json:
        print(json.dumps({"cores": os.cpu_count(), "rows": rows}, indent=2))  # noqa: T201
        return
    print("| nodes | all have met and agreed, s | all know the end, s |\n| --- | --- | --- |")  # noqa: T201
    for row in rows:
        print(f"| {row['nodes']:g} | {row['meet']:.2f} | {row['end']:.2f} |")  # noqa: T201


if __name__ == "__main__":
    main()
