"""A job's ports: derived from its id, and below the ephemeral range, from which the kernel picks ports by itself.

All Ray clusters on a host share Ray's defaults, and a port inside the ephemeral range can be taken between a check and
the bind. The control port is fixed before the nodes meet, so it depends on the job alone. Each node chooses the other
ports itself: the first free block, starting at a block derived from job and rank. Ray binds them seconds later, so a
node claims its block meanwhile against other launches.
"""

import contextlib
import hashlib
import math
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from entrypoints.errors import RayFailedError

CONTROL_PORTS = range(20_000, 21_000)
_NAMED = 20
"""Ports of a node for Ray's own processes."""
_LEAST_WORKERS, _WORKERS_PER_CPU = 480, 2
"""Ports for Ray's worker processes: Ray starts one for each CPU at once, and each actor needs one more."""
_UNIT = _NAMED + _LEAST_WORKERS
"""Ports that are claimed together. Each block consists of whole units, so that blocks of different sizes share them."""
_CLAIM = "\0slipway-ray-ports-"
"""An abstract socket with this name and a unit's first port claims the unit, in this network namespace and until its
process ends, as the ports themselves are taken."""
_CEILING = 32_768
"""Linux's default start of the ephemeral range. Blocks lie below it, or below the host's if lower."""
_LOWEST = 2_048
_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


@dataclass(frozen=True)
class RayPorts:
    """One node's block of ports."""

    base: int
    size: int = _UNIT

    @property
    def named(self) -> dict[str, int]:
        """The ports of Ray's own processes, by name."""
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
        """The ports of Ray's worker processes."""
        return range(self.base + _NAMED, self.base + self.size)

    def free(self) -> bool:
        """Whether all named ports can be bound now. Ray itself tries those of workers one by one."""
        return all(can_bind(port) for port in self.named.values())


@dataclass(frozen=True)
class ClaimedPorts:
    """A block that no other launch on this network chooses until it is released, or this process ends."""

    ports: RayPorts
    _claims: contextlib.ExitStack

    def release(self) -> None:
        self._claims.close()


def control_port(job_id: str) -> int:
    """The default control port of a job."""
    return CONTROL_PORTS[_number(job_id) % len(CONTROL_PORTS)]


def ray_blocks(job_id: str, node_rank: int, floor: int, cpus: int | None = None) -> list[RayPorts]:
    """All blocks below the ephemeral range, this node's first choice first. `floor` is where the range starts.

    Each block has room for `cpus` workers, by default for this host's. Ranks start at different blocks, because two
    containers of one job may share a host's network. Raises RayFailedError if no block fits.
    """
    ceiling = min(floor, _CEILING)
    size = _UNIT * math.ceil((_NAMED + _WORKERS_PER_CPU * (cpus or os.cpu_count() or 1)) / _UNIT)
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


def claim_ray_ports(job_id: str, node_rank: int, cpus: int | None = None) -> ClaimedPorts:
    """The first free block of `ray_blocks`, claimed. Raises RayFailedError if none is free."""
    blocks = ray_blocks(job_id, node_rank, ephemeral_floor(), cpus)
    for block in blocks:
        if claimed := _claim(block):
            return claimed
    raise RayFailedError(
        f"none of {len(blocks)} blocks of ports is free below {ephemeral_floor()}",
        hint="other jobs may have left processes on this host: see `ss -tlnp`",
    )


def _claim(block: RayPorts) -> ClaimedPorts | None:
    """None if another launch has claimed some of the block, or any program has one of its named ports."""
    with contextlib.ExitStack() as claims:
        for unit in range(block.base, block.base + block.size, _UNIT):
            claim = claims.enter_context(socket.socket(socket.AF_UNIX))
            try:
                claim.bind(f"{_CLAIM}{unit}")
            except OSError:
                return None
        return ClaimedPorts(block, claims.pop_all()) if block.free() else None


def ephemeral_floor() -> int:
    """The first port of the ephemeral range of this network namespace."""
    return int(_EPHEMERAL_RANGE.read_text(encoding="ascii").split()[0])


def _number(job_id: str) -> int:
    return int.from_bytes(hashlib.sha256(job_id.encode()).digest()[:4])


def can_bind(port: int) -> bool:
    """Whether the port is free on all IPv4 addresses of this host."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True
