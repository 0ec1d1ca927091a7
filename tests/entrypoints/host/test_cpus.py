import os
from pathlib import Path

import pytest

from entrypoints.host.cpus import available_cpus
from entrypoints.host.tree import Tree
from tests.entrypoints.hosts import HostTree

ALL = len(os.sched_getaffinity(0))
V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/cpu"


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("", {}, ALL),
        ("0::/", {f"{V2}/cpu.max": "max 100000"}, ALL),
        ("0::/", {f"{V2}/cpu.max": "100000 100000"}, 1),
        ("0::/", {f"{V2}/cpu.max": "50000 100000"}, 1),
        ("0::/", {f"{V2}/cpu.max": "199000 100000"}, 1),
        ("0::/", {f"{V2}/cpu.max": "99900000 100000"}, ALL),
        ("0::/job_7/step_0", {f"{V2}/job_7/step_0/cpu.max": "max 100000", f"{V2}/job_7/cpu.max": "100000 100000"}, 1),
        ("4:cpu,cpuacct:/docker/f00", {f"{V1}/cpu.cfs_quota_us": "100000", f"{V1}/cpu.cfs_period_us": "100000"}, 1),
        ("4:cpu,cpuacct:/", {f"{V1}/cpu.cfs_quota_us": "-1", f"{V1}/cpu.cfs_period_us": "100000"}, ALL),
        ("4:memory:/job", {"sys/fs/cgroup/memory/job/cpu.cfs_quota_us": "100000"}, ALL),
        ("0::/", {f"{V2}/cpu.max": "x y"}, ALL),
    ],
)
def test_the_lowest_quota_of_this_processs_groups_counts(
    tmp_path: Path, groups: str, files: dict[str, str], expected: int
) -> None:
    tree = HostTree(tmp_path)
    tree.write("proc/self/cgroup", groups)
    for name, text in files.items():
        tree.write(name, text)
    assert available_cpus(Tree(tmp_path)) == expected


def test_the_affinity_of_this_process_counts(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})  # as taskset and schedulers do
    try:
        assert available_cpus(Tree(tmp_path)) == 1
    finally:
        os.sched_setaffinity(0, before)
