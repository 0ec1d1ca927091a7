"""The memory that processes of this node may use."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

# Read in any case: a container may have its own group mounted here, but see the host's path.
_ROOTS = "0::/\n0:memory:/\n"


def available_memory(root: Path = Path("/")) -> int:
    """RAM in bytes, or the lowest limit of this process's control groups, such as a Slurm job's, if that is lower.

    `root` is the root of the file system.
    """
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *_limits(root)])


def _limits(root: Path) -> Iterator[int]:
    """The limits of this process's groups (version 2 or 1) and of all above them."""
    groups = _ROOTS
    with suppress(OSError):
        groups += (root / "proc/self/cgroup").read_text()
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount, file = ("memory", "memory.limit_in_bytes") if controllers else ("", "memory.max")
        for group in (PurePosixPath(path), *PurePosixPath(path).parents):
            with suppress(OSError, ValueError):  # no such group here, or "max"
                yield int((root / "sys/fs/cgroup" / mount / str(group).lstrip("/") / file).read_text())
