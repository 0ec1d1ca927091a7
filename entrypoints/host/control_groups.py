"""The control groups of this process, in which schedulers and container engines limit it."""

from collections.abc import Iterator
from pathlib import PurePosixPath

from entrypoints.host.tree import Tree

_ROOTS = "0::/\n0:{}:/\n"
"""Read in any case: a container without a cgroup namespace may have its group mounted here, but see the host's path."""


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
