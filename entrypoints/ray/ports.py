"""Which ports a job uses: derived from the job's id, below the range from which the kernel picks ports by itself.

Ray's defaults are shared by every Ray on a host, and a port checked and then bound inside the ephemeral range can be
taken in between. The control port must be known to all nodes beforehand, so it depends on the job alone. All others are
each node's own choice, told to the peers: a node takes the first free block, starting at one derived from job and rank.
"""

import hashlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from entrypoints.errors import RayFailedError

CONTROL_PORTS = range(20_000, 21_000)
_NAMED = 20
"""Ports of a node for Ray's own processes."""
_LEAST_WORKERS, _WORKERS_PER_CPU = 480, 2
"""Ports for Ray's worker processes: Ray starts one for each CPU at once, and actors come on top."""
_CEILING = 32_768
"""Linux's default ephemeral floor; blocks lie between this, or the host's lower floor, and the control ports."""
_LOWEST = 2_048
_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


@dataclass(frozen=True)
class RayPorts:
    """One node's block of ports."""

    base: int
    size: int = _NAMED + _LEAST_WORKERS

    @property
    def named(self) -> dict[str, int]:
        names = (
            "gcs",
            "node_manager",
            "object_manager",
            "client_server",
            "dashboard",
            "dashboard_agent_listen",
            "dashboard_agent_grpc",
            "runtime_env_agent",
            "metrics_export",
            "dashboard_metrics",
        )
        return {name: self.base + offset for offset, name in enumerate(names)}

    @property
    def workers(self) -> range:
        return range(self.base + _NAMED, self.base + self.size)

    def free(self) -> bool:
        """Whether all named ports can be bound now; those of workers are tried by Ray itself, one by one."""
        return all(can_bind(port) for port in self.named.values())


def control_port(job_id: str) -> int:
    return CONTROL_PORTS[_number(job_id) % len(CONTROL_PORTS)]


def ray_blocks(job_id: str, node_rank: int, floor: int, cpus: int | None = None) -> list[RayPorts]:
    """All blocks below the ephemeral floor, this node's first choice in front.

    They have room for this host's CPUs unless Ray is told of others. Ranks start at different blocks, as two containers
    of one job may share a host's network.
    """
    ceiling = min(floor, _CEILING)
    size = _NAMED + max(_LEAST_WORKERS, _WORKERS_PER_CPU * (cpus or os.cpu_count() or 1))
    lowest = CONTROL_PORTS.stop
    if ceiling < lowest + size:
        ceiling, lowest = min(ceiling, CONTROL_PORTS.start), _LOWEST
    blocks = [RayPorts(base, size) for base in range(ceiling - size, lowest - 1, -size)]
    if not blocks:
        raise RayFailedError(
            f"no room for {size} ports: the ephemeral range starts at {floor}",
            hint="raise net.ipv4.ip_local_port_range to start at 32768, its default",
        )
    first = (_number(job_id) + node_rank) % len(blocks)
    return blocks[first:] + blocks[:first]


def free_ray_ports(job_id: str, node_rank: int, cpus: int | None = None) -> RayPorts:
    """The first free one of `ray_blocks`. Raises RayFailedError without one."""
    blocks = ray_blocks(job_id, node_rank, ephemeral_floor(), cpus)
    for block in blocks:
        if block.free():
            return block
    raise RayFailedError(
        f"none of {len(blocks)} blocks of ports is free below {ephemeral_floor()}",
        hint="other jobs' processes may be left on this host: see `ss -tlnp`",
    )


def ephemeral_floor() -> int:
    """The first port that the kernel hands out by itself; per network namespace."""
    return int(_EPHEMERAL_RANGE.read_text(encoding="ascii").split()[0])


def _number(job_id: str) -> int:
    return int.from_bytes(hashlib.sha256(job_id.encode()).digest()[:4])


def can_bind(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True
