"""Checks of disk space, ports, and processes and directories that killed launches left."""

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from entrypoints.errors import RayFailedError
from entrypoints.host.file_systems import NETWORK_FILE_SYSTEMS, file_system
from entrypoints.preflight.check import GIB, Finding, NodeFacts, Verdict, ok, skip
from entrypoints.ray.directory import PATTERN, directory_prefix, in_use
from entrypoints.ray.ports import can_bind, claim_ray_ports, ephemeral_floor

LEAST_DISK, ENOUGH_DISK = 1 * GIB, 10 * GIB


def disk(facts: NodeFacts) -> Finding:
    """Whether /tmp can be written and has room for Ray's session, spilled objects and caches."""
    directory = facts.temporary
    try:
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        return Finding(
            "disk",
            Verdict.FAIL,
            f"{directory} cannot be written: {error.strerror}",
            f"mount a tmpfs: --tmpfs {directory}",
        )
    status = os.statvfs(directory)
    return judge_disk(status.f_bavail * status.f_frsize, directory)


def privacy(facts: NodeFacts) -> Finding:
    """Whether others share /tmp, where Ray's sockets and sessions lie."""
    directory = facts.temporary
    fix = f"mount a private one: --tmpfs {directory}, Slurm's job_container/tmpfs, or Apptainer's --contain"
    kind = file_system(str(directory), facts.tree)
    if kind in NETWORK_FILE_SYSTEMS:
        return Finding("tmp", Verdict.WARN, f"{directory} is on {kind}, which other nodes share", fix)
    status = directory.stat()
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        return Finding(
            "tmp",
            Verdict.WARN,
            f"everybody may remove files of this job in {directory}: its sticky bit is missing",
            fix,
        )
    owners = {_owner(entry) for entry in directory.iterdir()} - {0, os.getuid()}
    if owners:
        return Finding("tmp", Verdict.WARN, f"{directory} is shared: {len(owners)} other users have files there", fix)
    return ok("tmp", f"no other user has files in {directory}")


def _owner(path: Path) -> int:
    try:
        return path.lstat().st_uid
    except OSError:
        return 0  # it has gone meanwhile


def judge_disk(free: int, directory: Path) -> Finding:
    """The finding for `free` bytes in a directory."""
    words = f"{directory} has {free / GIB:.1f} GiB free"
    if free < LEAST_DISK:
        return Finding(
            "disk", Verdict.FAIL, f"{words}, Ray needs 1", f"free space in {directory}, or mount a larger disk there"
        )
    if free < ENOUGH_DISK:
        return Finding("disk", Verdict.WARN, words, f"mount a larger {directory} if the job spills objects")
    return ok("disk", words)


def ports(facts: NodeFacts) -> Finding:
    """Whether the control port is free on the head, and a block of ports for Ray on every node."""
    allocation, floor = facts.allocation, ephemeral_floor()
    if allocation.is_head and allocation.node_count > 1 and not can_bind(facts.control_port):
        return Finding(
            "ports", Verdict.FAIL, f"control port {facts.control_port} is taken",
            "choose another on all nodes with --control-port; `ss -tlnp` tells which process has it",
        )  # fmt: skip
    try:
        claimed = claim_ray_ports(allocation.job_id, allocation.node_rank)
    except RayFailedError as error:
        return Finding("ports", Verdict.FAIL, error.message, error.hint)
    claimed.release()
    block = claimed.ports
    words = f"control {facts.control_port}, Ray {block.base}-{block.workers.stop - 1}"
    if facts.control_port >= floor:
        return Finding(
            "ports", Verdict.WARN, f"{words}; the control port is in the ephemeral range, which starts at {floor}",
            "choose a control port below it with --control-port",
        )  # fmt: skip
    return ok("ports", words)


def leftovers(facts: NodeFacts, processes: Path = Path("/proc")) -> Finding:
    """Whether a job with the same id runs on this node, or launches that were killed left processes or directories."""
    if facts.allocation.local_rank > 0:
        return skip("leftovers", "only the node's first task checks")
    prefix = directory_prefix(facts.allocation.job_id, facts.allocation.node_rank, facts.chosen_port)
    if running := [path for path in sorted(facts.temporary.glob(f"{prefix}*")) if in_use(path)]:
        return Finding(
            "leftovers", Verdict.FAIL,
            f"another job with the same nodes and control port runs on this node: {running[0]} belongs to it",
            "run both side by side with another port for this one: --control-port, equal on all nodes",
        )  # fmt: skip
    lines = {entry.name: _command_line(entry) for entry in processes.iterdir() if entry.name.isdigit()}
    entries = sorted(number for number, line in lines.items() if prefix in line)
    if entries:
        return Finding(
            "leftovers", Verdict.FAIL, f"an earlier start of this job left Ray running: {', '.join(entries)}",
            f"end them: kill -9 {' '.join(entries)}",
        )  # fmt: skip
    dead = [str(directory) for directory in sorted(facts.temporary.glob(PATTERN)) if not in_use(directory)]
    if not dead:
        return ok("leftovers", "none")
    # Ray's workers and agents overwrite their command lines, but their logs lie in the directory.
    texts = {number: line + _open_files(processes / number) for number, line in lines.items()}
    entries = sorted(number for number, text in texts.items() if any(directory in text for directory in dead))
    ray = f", and Ray running: {', '.join(entries)}" if entries else ""
    return Finding(
        "leftovers", Verdict.WARN, f"launches that were killed left {', '.join(dead)}{ray}",
        "; ".join([*([f"kill -9 {' '.join(entries)}"] if entries else []), f"rm -r {' '.join(dead)}"]),
    )  # fmt: skip


def _open_files(process: Path) -> str:
    """The paths of the files that a process of this user has open, one a line."""
    paths = []
    with contextlib.suppress(OSError):  # another user's, or ended meanwhile
        paths += [str(link.readlink()) for link in (process / "fd").iterdir()]
    return "\n".join(paths)


def _command_line(process: Path) -> str:
    try:
        return (process / "cmdline").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""  # it has ended meanwhile
