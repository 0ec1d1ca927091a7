"""Reads the stacks of workers and the state of their nodes, on all nodes in parallel."""

import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trainer.cluster.stalls.explanation import Asked
from trainer.cluster.stalls.hosts import HostState, read_counters, read_host
from trainer.cluster.stalls.stacks import Probe, Standing, read_probe

# Seconds for all nodes to answer, for a silent one to accept a connection, and between two looks at counters.
PATIENCE, CONNECTING, INTERVAL = 20.0, 3.0, 2.0


@dataclass(frozen=True)
class Reading:
    """Where each worker stands, and the state of each node by its address; of a node that does not answer, None."""

    standings: dict[Asked, Standing]
    hosts: dict[str, HostState | None]


class _Reader:
    """A Ray actor that reads the workers of its node."""

    def read(self, run_dir: Path | None, *probes: Probe) -> tuple[list[Standing], HostState]:
        since = read_counters()
        with ThreadPoolExecutor(max(1, len(probes))) as threads:
            standings = list(threads.map(read_probe, probes))
        time.sleep(max(0.0, since.time + INTERVAL - time.monotonic()))
        return standings, read_host(since, run_dir)


class Readers:
    """A reader per node, kept once it is there: an overloaded node starts a process in minutes, or never."""

    def __init__(self) -> None:
        self._of_node: dict[str, ray.actor.ActorHandle] = {}

    def prepare(self, asked: Sequence[Asked]) -> None:
        """Starts a reader on each node of these workers that has none; returns at once."""
        for node in {call.node_id for call in asked} - self._of_node.keys():
            self._of_node[node] = _reader(node)

    def read(self, asked: Sequence[Asked], run_dir: Path | None = None, ended: Sequence[Asked] = ()) -> Reading:
        """What workers are doing, and the state of their nodes and of those whose calls have `ended`.

        Nodes are asked side by side; of one that does not answer, it is said whether it accepts connections.
        """
        self.prepare([*asked, *ended])
        by_node: dict[str, list[Asked]] = {call.node_id: [] for call in [*asked, *ended]}
        for call in asked:
            by_node[call.node_id].append(call)
        addresses = {call.node_id: call.address for call in [*asked, *ended]}
        answers = {
            node: self._of_node[node].read.remote(run_dir, *(call.probe for call in calls))
            for node, calls in by_node.items()
        }
        deadline = time.monotonic() + PATIENCE
        standings: dict[Asked, Standing] = {}
        hosts: dict[str, HostState | None] = {}
        silent = []
        for node, calls in by_node.items():
            try:
                read, host = ray.get(answers[node], timeout=max(0.0, deadline - time.monotonic()))
            except RayError as error:
                silent.append(node)
                if not isinstance(error, GetTimeoutError):  # it has died; else it answers once it can
                    ray.kill(self._of_node.pop(node))
                read, host = [Standing("")] * len(calls), None
            standings |= dict(zip(calls, read, strict=True))
            hosts[addresses[node]] = host
        for node, problem in _why_silent(silent).items():
            standings |= {call: Standing(f"is on a node that does not answer: {problem}") for call in by_node[node]}
        return Reading(standings, hosts)


def _reader(node_id: str) -> ray.actor.ActorHandle:
    here = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(_Reader).options(num_cpus=0, scheduling_strategy=here).remote()


def _why_silent(node_ids: Sequence[str]) -> dict[str, str]:
    """Whether nodes that do not answer can be reached: Ray's process of each is connected to."""
    if not node_ids:
        return {}
    nodes = {entry["NodeID"]: entry for entry in ray.nodes()}
    with ThreadPoolExecutor(min(32, len(node_ids))) as threads:
        return dict(zip(node_ids, threads.map(lambda node: _connected(nodes.get(node)), node_ids), strict=True))


def _connected(node: Mapping[str, Any] | None) -> str:
    if node is None:
        return "Ray has lost it"
    address = (node["NodeManagerAddress"], node["NodeManagerPort"])
    try:
        socket.create_connection(address, CONNECTING).close()
    except ConnectionRefusedError:
        return "Ray's process on it has ended"
    except OSError as error:
        return f"{ray.util.get_node_ip_address()} cannot reach it ({error.strerror or error})"
    return "it accepts connections, so its processes are frozen, or have hardly any processor time"
