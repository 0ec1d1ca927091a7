"""The CPUs and the memory that schedulers and container engines leave this process, in its control groups."""

import math
import os
from collections.abc import Iterator
from pathlib import PurePosixPath

from entrypoints.host.tree import Tree

_ROOTS = "0::/\n0:{}:/\n"
"""Read in any case: a container without a cgroup namespace may have its group mounted here, but see the host's path."""
_MEMORY_FILES = ("memory.max", "memory.limit_in_bytes")
"""Of control groups of version 2 and 1."""


def group_folders(tree: Tree, controller: str) -> Iterator[str]:
    """The folders of this process's groups (version 2, or 1 with this controller) and of all above them.

    Each may limit it: Slurm limits the job's group, which lies above the task's.
    """
    for line in (_ROOTS.format(controller) + (tree.text("proc/self/cgroup") or "")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = f"sys/fs/cgroup/{controller}" if controllers else "sys/fs/cgroup"
        for group in (PurePosixPath(path), *PurePosixPath(path).parents):
            yield f"{mount}{group}".rstrip("/")


def available_cpus(tree: Tree | None = None) -> int:
    """The CPUs of this process's affinity (taskset, a scheduler's binding, cpusets), or the lowest quota of its control
    groups (`docker run --cpus`, Kubernetes' limits) in whole CPUs if that is lower; at least 1."""
    tree = tree or Tree()
    quotas = (_quota(tree, folder) for folder in group_folders(tree, "cpu"))
    return max(1, math.floor(min([len(os.sched_getaffinity(0)), *(quota for quota in quotas if quota is not None)])))


def _quota(tree: Tree, folder: str) -> float | None:
    """The CPUs that one group may use on average; None without a limit."""
    quota, _, period = (tree.text(f"{folder}/cpu.max") or "").partition(" ")  # version 2
    if not quota.isdigit():
        quota = str(tree.number(f"{folder}/cpu.cfs_quota_us") or "")  # version 1; -1 is no limit
        period = str(tree.number(f"{folder}/cpu.cfs_period_us") or "")
    if not quota.isdigit() or not period.isdigit() or int(period) == 0 or int(quota) == 0:
        return None
    return int(quota) / int(period)


def available_memory(tree: Tree | None = None) -> int:
    """RAM in bytes, or the lowest limit of this process's control groups if that is lower."""
    return min(memory_limits(tree or Tree()).values())


def memory_limits(tree: Tree) -> dict[str, int]:
    """Memory limits in bytes: the node's RAM, and those of this process's control groups."""
    limits = {"RAM": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")}
    for folder in group_folders(tree, "memory"):
        for file in _MEMORY_FILES:
            if (limit := tree.number(f"{folder}/{file}")) is not None:
                limits[f"/{folder}/{file}"] = limit
    return limits
