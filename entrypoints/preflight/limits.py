"""Checks of shared memory and of this process's limits, which run flags set in a container."""

import os
import re
import resource
from collections.abc import Mapping
from pathlib import Path

from entrypoints.host.control_groups import group_folders, memory_limits
from entrypoints.host.tree import Tree
from entrypoints.preflight.check import GIB, MIB, Finding, NodeFacts, Verdict, ok, skip
from entrypoints.ray.object_store import RAY_MINIMUM

NCCL_SHARED_MEMORY = 1 * GIB
"""NCCL requires it: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html#shared-memory"""
STACK = 64 * MIB
MEMLOCK = 8 * GIB
"""Enough to register a training job's buffers for RDMA."""
_CAP_IPC_LOCK, _CAP_SYS_ADMIN, _CAP_SYS_RESOURCE = 1 << 14, 1 << 21, 1 << 24
"""https://man7.org/linux/man-pages/man7/capabilities.7.html"""
_ALL_USERS = ["0", "0", "4294967295"]
"""The user map of the initial namespace."""
LEAST_FILES, ENOUGH_FILES = 4_096, 65_536
"""Ray keeps a few connections per worker and per peer."""
RAYS_MEMORY = 400 * MIB
"""Of Ray's own processes on a node and of the command's first lines, without the object store."""
RAYS_TASKS, TASKS_PER_WORKER = 200, 25
"""Threads of Ray's own processes on a node and of the command, and of each worker: gRPC starts some for each CPU."""
ENOUGH_ADDRESSES = 256 * GIB
"""Less than the address space of a process that uses CUDA, which reserves that of all memory."""


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
    if _is_capable(facts.tree, _CAP_IPC_LOCK):
        return ok("memlock", "unlimited by CAP_IPC_LOCK")
    return Finding(
        "memlock", facts.severe,
        f"only {limit // 1024} KiB may be locked: RDMA cannot register buffers, so NCCL uses sockets or fails",
        "run the container with --ulimit memlock=-1 --cap-add IPC_LOCK; on Kubernetes add IPC_LOCK to the capabilities "
        "of a container that runs as root, or set LimitMEMLOCK=infinity for containerd",
    )  # fmt: skip


def _is_capable(tree: Tree, capabilities: int) -> bool:
    """Whether this process has one of these capabilities. The kernel does not count those of a user namespace
    (rootless Podman)."""
    match = re.search(r"^CapEff:\s*([0-9a-f]+)$", tree.text("proc/self/status") or "", re.MULTILINE)
    return match is not None and bool(int(match[1], 16) & capabilities) and _in_the_initial_namespace(tree)


def _in_the_initial_namespace(tree: Tree) -> bool:
    return (tree.text("proc/self/uid_map") or "").split() == _ALL_USERS


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


def processes(facts: NodeFacts) -> Finding:
    """Whether enough processes and threads may run for Ray: one worker for each CPU, each with many threads."""
    limit, used = resource.getrlimit(resource.RLIMIT_NPROC)[1], _tasks_of_this_user(facts.tree)
    exempt = _is_capable(facts.tree, _CAP_SYS_ADMIN | _CAP_SYS_RESOURCE)
    if exempt or (os.getuid() == 0 and _in_the_initial_namespace(facts.tree)):
        limit = -1  # https://man7.org/linux/man-pages/man2/getrlimit.2.html
    left = {"ulimit -u": (limit, used)} if limit >= 0 else {}
    for folder in group_folders(facts.tree, "pids"):
        if (most := facts.tree.number(f"{folder}/pids.max")) is not None:
            left[f"/{folder}/pids.max"] = (most, facts.tree.number(f"{folder}/pids.current") or 0)
    return judge_processes(left, facts.cpus)


def judge_processes(left: Mapping[str, tuple[int, int]], cpus: int) -> Finding:
    """The finding for limits of processes and threads: for each its value, and how many run already."""
    if not left:
        return ok("nproc", "unlimited")
    source, (limit, used) = min(left.items(), key=lambda item: item[1][0] - item[1][1])
    needed = RAYS_TASKS + TASKS_PER_WORKER * cpus
    words = f"{limit} processes and threads may run ({source}), {used} do"
    if limit - used < needed:
        fails = limit - used < RAYS_TASKS + TASKS_PER_WORKER  # not even one worker can start
        return Finding(
            "nproc", Verdict.FAIL if fails else Verdict.WARN,
            f"only {words}: Ray needs about {needed} for {cpus} CPUs",
            "raise the limit (--ulimit nproc=65536 or --pids-limit -1 of the container, ulimit -u, the scheduler's), "
            "or give Ray fewer CPUs with --num-cpus",
        )  # fmt: skip
    return ok("nproc", words)


def memory(facts: NodeFacts) -> Finding:
    """Whether the memory that this container may use has room for Ray and its object store."""
    return judge_memory(memory_limits(facts.tree), facts.object_store)


def judge_memory(limits: Mapping[str, int], object_store: int | None) -> Finding:
    """The finding for limits in bytes by what sets them. A store that Ray is not told the size of is the smallest."""
    source, limit = min(limits.items(), key=lambda item: item[1])
    words = f"{limit // MIB} MiB may be used ({source})"
    store = object_store or RAY_MINIMUM
    if limit < RAYS_MEMORY + store:
        needed = f"Ray needs about {RAYS_MEMORY // MIB} MiB and {store // MIB} for its object store"
        smaller = ", or ask for a smaller --object-store-memory" if object_store else ""
        return Finding(
            "memory", Verdict.FAIL, f"only {words}: {needed}",
            f"raise the limit: --memory of the container, limits.memory on Kubernetes, --mem of Slurm{smaller}",
        )  # fmt: skip
    return ok("memory", words)


def _tasks_of_this_user(tree: Tree) -> int:
    """The processes and threads of this user that are visible here."""
    user, count = str(os.getuid()), 0
    for name in tree.names("proc"):
        if name.isdigit():
            status = dict(line.partition(":")[::2] for line in (tree.text(f"proc/{name}/status") or "").splitlines())
            if status.get("Uid", "").split()[:1] == [user]:
                count += int(status.get("Threads", "1"))
    return count


def address_space(facts: NodeFacts) -> Finding:
    """Whether processes may reserve enough address space. Grid Engine's h_vmem limits it."""
    return judge_address_space(resource.getrlimit(resource.RLIMIT_AS)[0], facts.gpus)


def judge_address_space(limit: int, gpus: int) -> Finding:
    """The finding for a limit of `limit` bytes; negative is unlimited."""
    if limit < 0 or limit >= ENOUGH_ADDRESSES:
        return ok("address", "unlimited" if limit < 0 else f"{limit // GIB} GiB")
    who = "CUDA and Ray reserve" if gpus else "Ray reserves"
    words = f"processes may reserve {limit // GIB} GiB of address space (ulimit -v); {who} more than is used"
    return Finding("address", Verdict.WARN, words, "ulimit -v unlimited; on Grid Engine ask for no h_vmem")
