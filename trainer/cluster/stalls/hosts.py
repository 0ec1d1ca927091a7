"""The state of a node during a hang: load, memory, disk, network, container limits, GPUs."""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from trainer.cluster.stalls.gpus import gpu_problems
from trainer.cluster.stalls.network import Connections, read_connections

# Interfaces that carry no job's traffic.
_VIRTUAL = ("lo", "docker", "veth", "br-", "virbr")
_ERRORS = ("rx_errors", "tx_errors", "rx_dropped", "tx_dropped")
FULL = 0.02  # the free share of a disk or of the memory below which it is called full
APART = 0.05  # seconds between two readings of the free space


@dataclass(frozen=True)
class Counters:
    """What the kernel has counted at a time: an interface's bytes and errors by name, resent segments, and seconds for
    which the container's CPU limit held its processes back."""

    time: float
    interfaces: dict[str, dict[str, int]]
    resent: int
    held_back: float


@dataclass(frozen=True)
class HostState:
    """A node as rows of a page, what of it can explain a stall, and its connections."""

    rows: tuple[tuple[str, str], ...]
    problems: tuple[str, ...]
    connections: Connections


def read_counters() -> Counters:
    return Counters(time.monotonic(), _interfaces(), _resent(), held_back())


def read_host(since: Counters, run_dir: Path | None) -> HostState:
    """The state of this node, with what changed since the counters were read before."""
    now, rows, problems = read_counters(), [], []
    for name, total, free in _lowest(run_dir):
        rows.append((name, f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"))
        if free < FULL * total:
            problems.append(f"{name} is full: {free / 2**20:.0f} MiB of {total / 2**20:.0f} are free")
    rows.append(("load", f"{os.getloadavg()[0]:.1f} processes, {os.cpu_count()} cores"))
    passed = max(0.001, now.time - since.time)
    if (share := (now.held_back - since.held_back) / passed) > 0.1:
        problems.append(f"the container's CPU limit held processes back for {share:.1f} s in each second")
    for name, counted in now.interfaces.items():
        before = since.interfaces.get(name, counted)
        change = {key: value - before[key] for key, value in counted.items()}
        errors = sum(change[key] for key in _ERRORS)
        rows.append(
            (
                f"network {name}",
                f"{_rate(change['rx_bytes'], passed)} in, {_rate(change['tx_bytes'], passed)} out, {errors} errors and "
                f"drops in {passed:.0f} s; {sum(counted[key] for key in _ERRORS)} since it is up",
            )
        )
        if errors:
            problems.append(f"{name} had {errors} errors and drops in {passed:.0f} s")
    problems += [f"{name} is gone" for name in since.interfaces if name not in now.interfaces]
    rows.append(("segments sent again", f"{now.resent - since.resent} in {passed:.0f} s; {now.resent} since boot"))
    connections = read_connections()
    problems += connections.problems
    problems += gpu_problems()
    return HostState(tuple(rows), tuple(problems), connections)


def _lowest(run_dir: Path | None) -> Iterator[tuple[str, int, int]]:
    """The lower of two readings of `_stores`: a save that is tried again frees what it wrote, for some milliseconds."""
    before = {name: free for name, _, free in _stores(run_dir)}
    time.sleep(APART)
    for name, total, free in _stores(run_dir):
        yield name, total, min(free, before.get(name, free))


def _stores(run_dir: Path | None) -> Iterator[tuple[str, int, int]]:
    """Name, bytes and free bytes of the disks that a run writes, and of the memory."""
    paths = {"the run's directory": run_dir, "/tmp": Path("/tmp"), "/dev/shm": Path("/dev/shm")}
    for name, path in paths.items():
        if path is None:
            continue
        with suppress(OSError):
            status = os.statvfs(path)
            yield name, status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    memory = psutil.virtual_memory()
    yield "memory", memory.total, memory.available


def _interfaces() -> dict[str, dict[str, int]]:
    counters = {}
    for interface in sorted(Path("/sys/class/net").glob("*")):
        with suppress(OSError):
            names = ("rx_bytes", "tx_bytes", *_ERRORS)
            counted = {name: int((interface / "statistics" / name).read_text()) for name in names}
            if not interface.name.startswith(_VIRTUAL):
                counters[interface.name] = counted
    return counters


def _resent() -> int:
    with suppress(OSError, ValueError, IndexError):
        names, values = (
            line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if line.startswith("Tcp:")
        )
        return int(values[names.index("RetransSegs")])
    return 0


def held_back(root: Path = Path("/sys/fs/cgroup")) -> float:
    """Seconds for which the container's CPU limit held its processes back, of either version of control groups.

    Hosts mount version 1's controller alone or together with its neighbour.
    """
    for folder in ("", "cpu", "cpu,cpuacct", "cpuacct,cpu"):
        with suppress(OSError, ValueError):
            counted = dict(line.split() for line in (root / folder / "cpu.stat").read_text().splitlines())
            if "throttled_usec" in counted:
                return int(counted["throttled_usec"]) / 1e6
            if "throttled_time" in counted:
                return int(counted["throttled_time"]) / 1e9
    return 0.0


def _rate(count: float, seconds: float) -> str:
    return f"{count / seconds / 1e3:,.1f} kB/s"
