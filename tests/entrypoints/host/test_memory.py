import os
from pathlib import Path

import pytest

from entrypoints.host.memory import available_memory
from entrypoints.host.tree import Tree
from tests.entrypoints.hosts import HostTree

MIB = 1024**2
EVERYTHING = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"
SLURM_V2 = "/system.slice/slurmstepd.scope/job_7/step_0/user/task_0"
SLURM_V1 = "/slurm/uid_1000/job_7/step_0"


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/", {f"{V2}/memory.max": f"{64 * MIB}"}, 64 * MIB),
        ("0::/", {f"{V2}/memory.max": "max"}, EVERYTHING),
        ("4:memory:/", {f"{V1}/memory.limit_in_bytes": "9223372036854771712"}, EVERYTHING),
        ("4:memory:/docker/f00", {f"{V1}/memory.limit_in_bytes": f"{64 * MIB}"}, 64 * MIB),
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
                f"{V1}{SLURM_V1}/memory.limit_in_bytes": f"{32 * MIB}",
                f"{V1}/slurm/uid_1000/memory.limit_in_bytes": f"{64 * MIB}",
            },
            32 * MIB,
        ),
        ("0::/other", {f"{V2}{SLURM_V2}/memory.max": f"{64 * MIB}"}, EVERYTHING),
        ("0::/..", {f"{V2}/memory.max": "max"}, EVERYTHING),
    ],
)
def test_the_lowest_limit_of_this_processs_groups_counts(
    tmp_path: Path, groups: str, limits: dict[str, str], expected: int
) -> None:
    tree = HostTree(tmp_path)
    tree.write("proc/self/cgroup", groups)
    for name, limit in limits.items():
        tree.write(name, limit)
    assert available_memory(Tree(tmp_path)) == expected


def test_without_control_groups_all_memory_is_available(tmp_path: Path) -> None:
    assert available_memory(Tree(tmp_path)) == EVERYTHING
