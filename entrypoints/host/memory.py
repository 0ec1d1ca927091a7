"""The memory that this process may use."""

import os
from collections.abc import Iterator
from pathlib import PurePosixPath

from entrypoints.host.tree import Tree

_ROOTS = "0::/\n0:memory:/\n"
"""Read in any case: a container without a cgroup namespace may have its group mounted here, but see the host's path."""


def available_memory(tree: Tree | None = None) -> int:
    """RAM in bytes, or the lowest limit of this process's control groups if that is lower."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([memory, *_limits(tree or Tree())])


def _limits(tree: Tree) -> Iterator[int]:
    """The limits of this process's groups (version 2 or 1) and of all above them. Slurm limits the job's group."""
    for line in (_ROOTS + (tree.text("proc/self/cgroup") or "")).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, file = "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            mount, file = "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        for group in (PurePosixPath(path), *PurePosixPath(path).parents):
            if (limit := tree.number(f"{mount}{group}/{file}")) is not None:
                yield limit
