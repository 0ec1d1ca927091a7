"""The memory that this process may use."""

import os

from entrypoints.host.control_groups import group_folders
from entrypoints.host.tree import Tree

_FILES = ("memory.max", "memory.limit_in_bytes")
"""Of control groups of version 2 and 1."""


def available_memory(tree: Tree | None = None) -> int:
    """RAM in bytes, or the lowest limit of this process's control groups if that is lower."""
    return min(memory_limits(tree or Tree()).values())


def memory_limits(tree: Tree) -> dict[str, int]:
    """Memory limits in bytes: the node's RAM, and those of this process's control groups."""
    limits = {"RAM": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")}
    for folder in group_folders(tree, "memory"):
        for file in _FILES:
            if (limit := tree.number(f"{folder}/{file}")) is not None:
                limits[f"/{folder}/{file}"] = limit
    return limits
