"""The file system under a path, and which ones the nodes of a cluster share."""

import os
from pathlib import Path

from entrypoints.host.tree import Tree

NETWORK_FILE_SYSTEMS = {
    *("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "fuse.ceph-fuse", "fuse.glusterfs"),
    *("pvfs2", "orangefs", "panfs", "wekafs", "afs", "cifs", "smb3"),
}
"""File systems that the nodes of a cluster usually share, by their names in the kernel."""


def file_system(path: str, tree: Tree) -> str:
    """The type of the path's file system: that of the deepest mount, the last one if several share its path."""
    mounts = [line.split() for line in (tree.text("proc/self/mountinfo") or "").splitlines()]
    kinds = {fields[4]: fields[fields.index("-") + 1] for fields in mounts if "-" in fields[5:]}
    above = [point for point in kinds if Path(os.path.realpath(path)).is_relative_to(point)]
    return kinds[max(above, key=len)] if above else ""
