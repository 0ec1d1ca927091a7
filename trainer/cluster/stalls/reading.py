"""Reads where workers stand, on all their nodes side by side, with the state of each node."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trainer.cluster.stalls.explanation import Asked
from trainer.cluster.stalls.hosts import HostState, read_counters, read_host
from trainer.cluster.stalls.stacks import Probe, Standing, read_probe

# Seconds for all nodes to answer, and between two looks at a node's counters.
PATIENCE, INTERVAL = 20.0, 2.0


@dataclass(frozen=True)
class Reading:
    """Where each worker stands, and the state of each node by its address; of a node that does not answer, None."""

    standings: dict[Asked, Standing]
    hosts: dict[str, HostState | None]


class _Reader:
    """A Ray actor that reads the workers of its node."""

    def read(self, run_dir: Path | None, *probes: Probe) -> tuple[list[Standing], HostState]:
        since = read_counters()
        with ThreadPoolExecutor(len(probes)) as threads:
            standings = list(threads.map(read_probe, probes))
        time.sleep(max(0.0, since.time + INTERVAL - time.monotonic()))
        return standings, read_host(since, run_dir)


class Readers:
    """A reader per node. It is kept once it was needed: an overloaded node starts a process in minutes, or never."""

    def __init__(self) -> None:
        self._of_node: dict[str, ray.actor.ActorHandle] = {}

    def prepare(self, asked: Sequence[Asked]) -> None:
        """Starts a reader on each node of these workers that has none; returns at once."""
        for node in {one.node_id for one in asked} - self._of_node.keys():
            self._of_node[node] = _reader(node)

    def read(self, asked: Sequence[Asked], run_dir: Path | None = None) -> Reading:
        """Where workers stand. Nodes are asked side by side; one that does not answer says so."""
        self.prepare(asked)
        by_node: dict[str, list[Asked]] = {}
        for one in asked:
            by_node.setdefault(one.node_id, []).append(one)
        answers = {
            node: self._of_node[node].read.remote(run_dir, *(one.probe for one in own)) for node, own in by_node.items()
        }
        deadline = time.monotonic() + PATIENCE
        standings: dict[Asked, Standing] = {}
        hosts: dict[str, HostState | None] = {}
        for node, own in by_node.items():
            try:
                read, host = ray.get(answers[node], timeout=max(0.0, deadline - time.monotonic()))
            except RayError:
                read, host = [Standing("is on a node that does not answer")] * len(own), None
                ray.kill(self._of_node.pop(node))
            standings |= dict(zip(own, read, strict=True))
            hosts[own[0].address] = host
        return Reading(standings, hosts)


def _reader(node_id: str) -> ray.actor.ActorHandle:
    here = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(_Reader).options(num_cpus=0, scheduling_strategy=here).remote()
