"""Measures the network between each pair of nodes, for `launch preflight --network`.

For each pair, one process per GPU (on CPU one per node) joins a process group and sums a buffer over all ranks, with
NCCL on GPUs and Gloo on CPU. NCCL's log tells the transport; sockets on a host with RDMA adapters are a failure.
"""

import itertools
import os
import re
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from entrypoints.error_lines import cause
from entrypoints.host.accelerators import ACCELERATORS, accelerator_of
from entrypoints.host.settings import read_manifest
from entrypoints.host.tree import Tree

CPU_SIZE, GPU_SIZE = 16 * 1024**2, 256 * 1024**2
"""Bytes in the buffer."""
ROUNDS = 5
ALL_PAIRS = 16
"""Up to this many nodes every pair is measured, with more each node and the next one."""
SLOW = 0.5
"""A pair is slow below this share of the median."""
PATIENCE = 120.0
"""Seconds for one pair."""
_TRANSPORT = re.compile(r"(?:Using network|via NET/)\s*([A-Za-z_]+)")


@dataclass(frozen=True)
class NodePair:
    """The measurement of two nodes."""

    hosts: tuple[str, str]
    backend: str
    gigabytes_per_second: float
    """Bus bandwidth, comparable between numbers of ranks:
    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md"""
    transport: str
    """NCCL's transport (`IB`, `Socket`, `Libfabric`); `gloo` on CPU."""
    problem: str = ""


class Rank:
    """A Ray actor that is one rank of a process group."""

    def address(self) -> str:
        """This node's address with a port that is free now."""
        import socket

        from entrypoints.host.network.interfaces import bracketed

        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"{bracketed(ray.util.get_node_ip_address())}:{probe.getsockname()[1]}"

    def fabric(self) -> str:
        """The kind of this node's fabric."""
        from entrypoints.host.network.fabric import detect_fabric

        return detect_fabric(Tree(), os.environ).kind

    def measure(self, backend: str, device: str, where: str, rank: int, size: int) -> tuple[float, str]:
        """Seconds for one sum over all ranks, and NCCL's log, which is empty for other libraries."""
        log = Path(tempfile.mkstemp(prefix="slipway-nccl-")[1])
        os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(log)}
        import torch
        from torch import distributed

        distributed.init_process_group(backend, init_method=f"tcp://{where}", rank=rank, world_size=size)
        try:
            buffer = torch.ones(_buffer_size(device) // 4, dtype=torch.float32, device=device)
            distributed.all_reduce(buffer)  # connects
            distributed.barrier()
            begin = time.perf_counter()
            for _ in range(ROUNDS):
                distributed.all_reduce(buffer)
            distributed.barrier()
            _ = buffer[0].item()  # waits until the device has finished
            return (time.perf_counter() - begin) / ROUNDS, log.read_text(encoding="utf-8", errors="replace")
        finally:
            distributed.destroy_process_group()
            log.unlink()


Actor = ray.remote(num_cpus=0)(Rank)


def transport_of(log: str) -> str:
    """The transport in NCCL's log; `none` if it used no network."""
    transports = _TRANSPORT.findall(log)
    return str(transports[-1]) if transports else "none"


def pairs_of(nodes: Sequence[Any]) -> list[tuple[Any, Any]]:
    """The pairs of nodes to measure."""
    if len(nodes) <= ALL_PAIRS:
        return list(itertools.combinations(nodes, 2))
    return [(node, nodes[(index + 1) % len(nodes)]) for index, node in enumerate(nodes)]


def try_pair(first: dict[str, Any], second: dict[str, Any]) -> NodePair:
    """The measurement, or a pair with the problem if it failed."""
    try:
        return measure_pair(first, second)
    except ray.exceptions.RayError as error:
        hangs = isinstance(error, ray.exceptions.GetTimeoutError)
        problem = (
            f"no data arrived within {PATIENCE:g} s"
            if hangs
            else f"it failed: {cause(str(error), type(error).__name__)}"
        )
        return NodePair((first["NodeManagerHostname"], second["NodeManagerHostname"]), "none", 0.0, "nothing", problem)


def measure_pair(first: dict[str, Any], second: dict[str, Any]) -> NodePair:
    """The measurement. Raises ray.exceptions.RayError if a rank fails, GetTimeoutError if the pair hangs."""
    each = int(min(node["Resources"].get("GPU", 0) for node in (first, second)))
    backend, device = _library() if each else ("gloo", "cpu")
    ranks = [
        Actor.options(
            num_gpus=1 if each else 0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        ).remote()
        for node in (first, second)
        for _ in range(each or 1)
    ]
    try:
        where = ray.get(ranks[0].address.remote(), timeout=PATIENCE)
        calls = [rank.measure.remote(backend, device, where, index, len(ranks)) for index, rank in enumerate(ranks)]
        results = ray.get(calls, timeout=PATIENCE)
        kinds = ray.get([rank.fabric.remote() for rank in ranks], timeout=PATIENCE)
    finally:
        for rank in ranks:
            ray.kill(rank)
    seconds = max(seconds for seconds, _ in results)
    share = 2 * (len(ranks) - 1) / len(ranks)
    transport = transport_of(results[0][1]) if each else backend
    hosts = (first["NodeManagerHostname"], second["NodeManagerHostname"])
    speed = _buffer_size(device) / seconds * share / 1e9
    return NodePair(hosts, backend, round(speed, 3), transport, fallback(transport, kinds))


def _library() -> tuple[str, str]:
    """torch.distributed's backend and torch's device for the GPUs of this image; outside an image those of CUDA."""
    row = accelerator_of(read_manifest(Tree()).get("target")) or ACCELERATORS[0]
    return row.backend, row.device


def _buffer_size(device: str) -> int:
    return CPU_SIZE if device == "cpu" else GPU_SIZE


def fallback(transport: str, kinds: Sequence[str]) -> str:
    """The problem if NCCL used sockets although the hosts have RDMA adapters; else empty."""
    rdma = [kind for kind in kinds if kind != "ethernet"]
    if transport.lower() == "socket" and rdma:
        return f"NCCL fell back to sockets although the hosts have {rdma[0]} adapters: see `launch preflight` there"
    return ""


def judge(pairs: Sequence[NodePair]) -> list[str]:
    """The failing hosts: those whose pairs are all slow or broken, and both hosts of any other such pair."""
    median = statistics.median(pair.gigabytes_per_second for pair in pairs)
    bad = [pair for pair in pairs if pair.problem or pair.gigabytes_per_second < SLOW * median]
    hosts = dict.fromkeys(host for pair in bad for host in pair.hosts)
    blamed = [host for host in hosts if all(pair in bad for pair in pairs if host in pair.hosts)]
    unexplained = [pair for pair in bad if not set(pair.hosts) & set(blamed)]
    return blamed + list(dict.fromkeys(host for pair in unexplained for host in pair.hosts))


def measure(nodes: Sequence[dict[str, Any]]) -> list[NodePair]:
    """The pairs of nodes, each measured or with its problem."""
    return [try_pair(first, second) for first, second in pairs_of(nodes)]


def lines(pairs: Sequence[NodePair]) -> list[str]:
    """A line per pair."""
    return [
        f"{' - '.join(pair.hosts)}  {pair.gigabytes_per_second:.2f} GB/s  {pair.backend} over {pair.transport}"
        + (f"  {pair.problem}" if pair.problem else "")
        for pair in pairs
    ]
