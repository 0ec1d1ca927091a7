"""The CPUs that this process may use."""

import math
import os

from entrypoints.host.control_groups import group_folders
from entrypoints.host.tree import Tree


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
