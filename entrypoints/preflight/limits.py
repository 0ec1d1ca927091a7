"""Checks of shared memory and of this process's limits, which run flags set in a container."""

import os
import re
import resource
from pathlib import Path

from entrypoints.host.tree import Tree
from entrypoints.preflight.check import GIB, MIB, Finding, NodeFacts, Verdict, ok, skip

NCCL_SHARED_MEMORY = 1 * GIB
"""NCCL requires it: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html#shared-memory"""
STACK = 64 * MIB
MEMLOCK = 8 * GIB
"""Enough to register a training job's buffers for RDMA."""
_CAP_IPC_LOCK = 1 << 14
"""https://man7.org/linux/man-pages/man7/capabilities.7.html"""
_ALL_USERS = ["0", "0", "4294967295"]
"""The user map of the initial namespace."""
LEAST_FILES, ENOUGH_FILES = 4_096, 65_536
"""Ray keeps a few connections per worker and per peer."""


def shared_memory(facts: NodeFacts, directory: Path = Path("/dev/shm")) -> Finding:
    """Whether /dev/shm is large enough for NCCL and Ray's object store."""
    try:
        status = os.statvfs(directory)
    except OSError as error:
        return Finding(
            "shm", Verdict.FAIL, f"{directory}: {error.strerror}", "run the container with --shm-size or --ipc=host"
        )
    return judge_shared_memory(status.f_blocks * status.f_frsize, facts.gpus)


def judge_shared_memory(size: int, gpus: int) -> Finding:
    """The finding for a /dev/shm of `size` bytes."""
    words = f"/dev/shm has {size // MIB} MiB"
    if gpus and size < NCCL_SHARED_MEMORY:
        return Finding(
            "shm", Verdict.FAIL, f"{words}, NCCL needs 1024", "run the container with --shm-size=16g or --ipc=host"
        )
    if size < 128 * MIB:
        return Finding(
            "shm", Verdict.WARN, f"{words}: Ray's object store goes to disk", "run the container with --shm-size=2g"
        )
    return ok("shm", words)


def locked_memory(facts: NodeFacts) -> Finding:
    """Whether enough memory may be locked for RDMA."""
    return judge_locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], facts)


def judge_locked_memory(limit: int, facts: NodeFacts) -> Finding:
    """The finding for a limit of `limit` bytes; negative is unlimited."""
    if not facts.rdma:
        return skip("memlock", "no RDMA adapter, or no GPU is used")
    if limit < 0 or limit >= MEMLOCK:
        return ok("memlock", "unlimited" if limit < 0 else f"{limit // GIB} GiB")
    if _may_lock_everything(facts.tree):
        return ok("memlock", "unlimited by CAP_IPC_LOCK")
    return Finding(
        "memlock", facts.severe,
        f"only {limit // 1024} KiB may be locked: RDMA cannot register buffers, so NCCL uses sockets or fails",
        "run the container with --ulimit memlock=-1 --cap-add IPC_LOCK; on Kubernetes add IPC_LOCK to the capabilities "
        "of a container that runs as root, or set LimitMEMLOCK=infinity for containerd",
    )  # fmt: skip


def _may_lock_everything(tree: Tree) -> bool:
    """Whether this process has CAP_IPC_LOCK. The kernel does not count it in a user namespace (rootless Podman)."""
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", tree.text("proc/self/status") or "", re.MULTILINE)
    everywhere = (tree.text("proc/self/uid_map") or "").split() == _ALL_USERS
    return found is not None and bool(int(found[1], 16) & _CAP_IPC_LOCK) and everywhere


def stack(facts: NodeFacts) -> Finding:
    """Whether the stack limit suits GPU libraries."""
    return judge_stack(resource.getrlimit(resource.RLIMIT_STACK)[0], facts.gpus)


def judge_stack(limit: int, gpus: int) -> Finding:
    """The finding for a limit of `limit` bytes; negative is unlimited."""
    if not gpus:
        return skip("stack", "no GPU")
    if 0 <= limit < STACK:
        return Finding("stack", Verdict.WARN, f"{limit // MIB} MiB", f"run the container with --ulimit stack={STACK}")
    return ok("stack", "unlimited" if limit < 0 else f"{limit // MIB} MiB")


def open_files(_facts: NodeFacts) -> Finding:
    """Whether enough files may be open for Ray. `launch` raises the soft limit to the hard one."""
    return judge_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def judge_open_files(limit: int) -> Finding:
    """The finding for this hard limit; negative is unlimited."""
    fix = f"run the container with --ulimit nofile={ENOUGH_FILES * 16}"
    if 0 <= limit < LEAST_FILES:
        return Finding("nofile", Verdict.FAIL, f"at most {limit} files may be open: too few for Ray", fix)
    return ok("nofile", "unlimited" if limit < 0 else f"{limit} files")
