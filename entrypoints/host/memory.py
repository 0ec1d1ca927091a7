"""The memory that this process may use."""

import os

from entrypoints.host.control_groups import group_folders
from entrypoints.host.tree import Tree

_FILES = ("memory.max", "memory.limit_in_bytes")
"""Of control groups of version 2 and 1."""


def available_memory(tree: Tree | None = None) -> int:
    """RAM in bytes, or the lowest limit of this process's control groups if that is lower."""
    tree = tree or Tree()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = (tree.number(f"{folder}/{file}") for folder in group_folders(tree, "memory") for file in _FILES)
    return min([memory, *(limit for limit in limits if limit is not None)])
