"""CPUs and memory within this process's control groups."""

import os
from pathlib import Path

import pytest

from entrypoints.host.control_groups import available_cpus, available_memory
from entrypoints.host.tree import Tree
from tests.entrypoints.hosts import HostTree

MIB = 1024**2
ALL_CPUS = len(os.sched_getaffinity(0))
ALL_MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
V2, V1_CPU, V1_MEMORY = "sys/fs/cgroup", "sys/fs/cgroup/cpu", "sys/fs/cgroup/memory"
SLURM_V2 = "/system.slice/slurmstepd.scope/job_7/step_0/user/task_0"
SLURM_V1 = "/slurm/uid_1000/job_7/step_0"


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("", {}, ALL_CPUS),
        ("0::/", {f"{V2}/cpu.max": "max 100000"}, ALL_CPUS),
        ("0::/", {f"{V2}/cpu.max": "100000 100000"}, 1),
        ("0::/", {f"{V2}/cpu.max": "50000 100000"}, 1),
        ("0::/", {f"{V2}/cpu.max": "199000 100000"}, 1),
        ("0::/", {f"{V2}/cpu.max": "99900000 100000"}, ALL_CPUS),
        ("0::/job_7/step_0", {f"{V2}/job_7/step_0/cpu.max": "max 100000", f"{V2}/job_7/cpu.max": "100000 100000"}, 1),
        (
            "4:cpu,cpuacct:/docker/f00",
            {f"{V1_CPU}/cpu.cfs_quota_us": "100000", f"{V1_CPU}/cpu.cfs_period_us": "100000"},
            1,
        ),
        ("4:cpu,cpuacct:/", {f"{V1_CPU}/cpu.cfs_quota_us": "-1", f"{V1_CPU}/cpu.cfs_period_us": "100000"}, ALL_CPUS),
        ("4:memory:/job", {"sys/fs/cgroup/memory/job/cpu.cfs_quota_us": "100000"}, ALL_CPUS),
        ("0::/", {f"{V2}/cpu.max": "x y"}, ALL_CPUS),
    ],
)
def test_the_lowest_cpu_quota_of_this_processs_groups_counts(
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


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/", {f"{V2}/memory.max": f"{64 * MIB}"}, 64 * MIB),
        ("0::/", {f"{V2}/memory.max": "max"}, ALL_MEMORY),
        ("4:memory:/", {f"{V1_MEMORY}/memory.limit_in_bytes": "9223372036854771712"}, ALL_MEMORY),
        ("4:memory:/docker/f00", {f"{V1_MEMORY}/memory.limit_in_bytes": f"{64 * MIB}"}, 64 * MIB),
        ("0::/docker/f00", {f"{V2}/memory.max": f"{64 * MIB}"}, 64 * MIB),
        ("", {f"{V2}/memory.max": f"{64 * MIB}"}, 64 * MIB),
        (
            f"0::{SLURM_V2}",
            {
                f"{V2}{SLURM_V2}/memory.max": "max",
                f"{V2}/system.slice/slurmstepd.scope/job_7/memory.max": f"{32 * MIB}",
                f"{V2}/system.slice/memory.max": f"{64 * MIB}",
            },
            32 * MIB,
        ),
        (
            f"9:cpuset:/\n8:cpu,memory:{SLURM_V1}\n1:name=systemd:/\n0::/",
            {
                f"{V1_MEMORY}{SLURM_V1}/memory.limit_in_bytes": f"{32 * MIB}",
                f"{V1_MEMORY}/slurm/uid_1000/memory.limit_in_bytes": f"{64 * MIB}",
            },
            32 * MIB,
        ),
        ("0::/other", {f"{V2}{SLURM_V2}/memory.max": f"{64 * MIB}"}, ALL_MEMORY),
        ("0::/..", {f"{V2}/memory.max": "max"}, ALL_MEMORY),
    ],
)
def test_the_lowest_memory_limit_of_this_processs_groups_counts(
    tmp_path: Path, groups: str, limits: dict[str, str], expected: int
) -> None:
    tree = HostTree(tmp_path)
    tree.write("proc/self/cgroup", groups)
    for name, limit in limits.items():
        tree.write(name, limit)
    assert available_memory(Tree(tmp_path)) == expected


def test_without_control_groups_all_memory_is_available(tmp_path: Path) -> None:
    assert available_memory(Tree(tmp_path)) == ALL_MEMORY
