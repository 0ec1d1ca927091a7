"""Places to write, ports to listen on, and what an earlier start of this job may have left."""

import os
import tempfile
from pathlib import Path

from entrypoints.errors import RayFailedError
from entrypoints.preflight.check import GIB, Finding, Node, Verdict, ok, skip
from entrypoints.ray.directory import directory_prefix
from entrypoints.ray.ports import can_bind, ephemeral_floor, free_ray_ports

LEAST_DISK, ENOUGH_DISK = 1 * GIB, 10 * GIB


def disk(node: Node) -> Finding:
    """Ray's session, spilled objects and the caches lie there."""
    place = node.temporary
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        return Finding(
            "disk", Verdict.FAIL, f"{place} cannot be written: {error.strerror}", f"mount a tmpfs: --tmpfs {place}"
        )
    status = os.statvfs(place)
    return judge_disk(status.f_bavail * status.f_frsize, place)


def judge_disk(free: int, place: Path) -> Finding:
    """`free` in bytes."""
    words = f"{place} has {free / GIB:.1f} GiB free"
    if free < LEAST_DISK:
        return Finding(
            "disk", Verdict.FAIL, f"{words}, Ray needs 1", f"make room on {place}, or mount a larger one there"
        )
    if free < ENOUGH_DISK:
        return Finding("disk", Verdict.WARN, words, f"mount a larger {place} if the job spills objects")
    return ok("disk", words)


def ports(node: Node) -> Finding:
    """The control port on the head, and a block for Ray everywhere."""
    allocation, floor = node.allocation, ephemeral_floor()
    if allocation.is_head and allocation.node_count > 1 and not can_bind(node.control_port):
        return Finding(
            "ports", Verdict.FAIL, f"control port {node.control_port} is taken",
            "choose another on all nodes: --control-port; who has it: ss -tlnp",
        )  # fmt: skip
    try:
        block = free_ray_ports(allocation.job_id, allocation.node_rank)
    except RayFailedError as error:
        return Finding("ports", Verdict.FAIL, error.message, error.hint)
    words = f"control {node.control_port}, Ray {block.base}-{block.workers.stop - 1}"
    if node.control_port >= floor:
        return Finding(
            "ports", Verdict.WARN, f"{words}; the kernel hands out ports from {floor} on, the control port too",
            "choose a control port below it: --control-port",
        )  # fmt: skip
    return ok("ports", words)


def leftovers(node: Node, processes: Path = Path("/proc")) -> Finding:
    """Processes of a Ray that an earlier start of this job left on this node."""
    if node.allocation.local_rank > 0:
        return skip("leftovers", "the node's first task looks")
    prefix = directory_prefix(node.allocation.job_id, node.allocation.node_rank, node.chosen_port)
    found = [entry.name for entry in processes.iterdir() if entry.name.isdigit() and prefix in _command_line(entry)]
    if not found:
        return ok("leftovers", "none")
    return Finding(
        "leftovers", Verdict.FAIL, f"an earlier start of this job left Ray running: {', '.join(sorted(found))}",
        f"end them: kill -9 {' '.join(sorted(found))}",
    )  # fmt: skip


def _command_line(process: Path) -> str:
    try:
        return (process / "cmdline").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""  # it ended while we looked
