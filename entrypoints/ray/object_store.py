"""The size of Ray's object store."""

import os
from dataclasses import dataclass

from entrypoints.host.control_groups import available_memory

RAY_MINIMUM = 75 * 1024**2
"""Ray refuses a smaller store."""
_MIB = 1024**2


@dataclass(frozen=True)
class ObjectStoreSize:
    """A size and the reason for it."""

    size: int
    """Bytes."""
    reason: str


def choose_object_store(requested: int | None) -> ObjectStoreSize:
    """The requested size in bytes, else min(30 % of RAM, 80 % of /dev/shm).

    Ray puts a store larger than /dev/shm on disk in /tmp, where it is slow and fills the container's layer.
    """
    if requested is not None:
        return ObjectStoreSize(requested, "requested")
    memory, shared = available_memory(), free_shared_memory()
    size = min(memory * 3 // 10, shared * 8 // 10)
    which = (
        f"30 % of {memory // _MIB} MiB RAM" if size == memory * 3 // 10 else f"80 % of {shared // _MIB} MiB /dev/shm"
    )
    if size < RAY_MINIMUM:
        return ObjectStoreSize(
            RAY_MINIMUM,
            f"Ray's minimum, because {which} is less; it is slow, on disk in /tmp: run the container with a larger "
            "--shm-size or --ipc=host",
        )
    return ObjectStoreSize(size, which)


def free_shared_memory() -> int:
    """Free bytes in /dev/shm; 0 if it does not exist."""
    try:
        status = os.statvfs("/dev/shm")
    except FileNotFoundError:
        return 0
    return status.f_bavail * status.f_frsize
