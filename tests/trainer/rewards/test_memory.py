"""The memory that reward processes share, from the control groups of this process."""

import os
from pathlib import Path

import pytest

from trainer.rewards.processes.memory import available_memory

GIB = 2**30
EVERYTHING = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
JOB = "system.slice/slurmstepd.scope/job_7"


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        (None, {}, EVERYTHING),
        ("0::/", {"memory.max": "max"}, EVERYTHING),
        ("0::/", {"memory.max": f"{GIB}"}, GIB),
        ("0::/docker/f00", {"memory.max": f"{GIB}"}, GIB),  # the host's path, in a container
        (f"0::/{JOB}/step_0", {f"{JOB}/step_0/memory.max": "max", f"{JOB}/memory.max": f"{GIB}"}, GIB),
        ("4:cpu,memory:/job_7\n0::/", {"memory/job_7/memory.limit_in_bytes": f"{GIB}"}, GIB),
        ("4:cpu:/job_7", {"job_7/memory.max": f"{GIB}"}, EVERYTHING),
    ],
)
def test_the_lowest_limit_of_this_processs_groups_counts(
    groups: str | None, limits: dict[str, str], expected: int, tmp_path: Path
) -> None:
    if groups is not None:
        (tmp_path / "proc" / "self").mkdir(parents=True)
        (tmp_path / "proc" / "self" / "cgroup").write_text(f"{groups}\n")
    for name, limit in limits.items():
        file = tmp_path / "sys" / "fs" / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{limit}\n")
    assert available_memory(tmp_path) == expected
