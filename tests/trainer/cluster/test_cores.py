"""Cores for the processes of a GPU. NVML is a fake, because the real one needs NVIDIA's driver."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.cluster import cores
from trainer.cluster.cores import cores_in, near_cores, part

ROOT = Path(__file__).parents[3]
PROGRAM = """
import os
from trainer.cluster.cores import keep_to_cores
keep_to_cores('none', 1, 2)
print(sorted(os.sched_getaffinity(0)))
"""


class PlayedError(Exception):
    pass


def fake_nvml(monkeypatch: pytest.MonkeyPatch, words: list[int] | None) -> None:
    """A fake NVML that knows GPU 3, or no GPU."""

    def affinity(device: int, size: int) -> list[int]:
        if words is None:
            raise PlayedError("no driver")
        return (words + [0] * size)[:size] if device == 3 else [0] * size

    module = SimpleNamespace(
        NVMLError=PlayedError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetCpuAffinity=affinity,
    )
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr(os, "sysconf", lambda _name: 100)


def test_cores_next_to_a_gpu_come_from_nvml_mocked(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(monkeypatch, [0b1100, 0b1])
    assert near_cores(3) == near_cores("3") == {2, 3, 64}
    assert near_cores("GPU-2b1c") == set()


def test_without_an_affinity_from_a_fake_nvml_no_core_is_near(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_nvml(monkeypatch, None)
    assert near_cores(3) == set()
    assert "next to GPU 3: no driver" in caplog.text


@pytest.mark.parametrize(
    ("near", "kept"),
    [
        pytest.param({2, 3, 70}, {2, 3}, id="near the GPU, if it may use them"),
        pytest.param({0, 1, 2, 3, 4}, {2, 3}, id="its part, where all are near"),
        pytest.param(set[int](), {2, 3}, id="its part, where nothing is known"),
        pytest.param({1, 2, 3}, {1, 2, 3}, id="those of its socket, which other GPUs share"),
    ],
)
def test_a_process_is_pinned_to(monkeypatch: pytest.MonkeyPatch, near: set[int], kept: set[int]) -> None:
    chosen: list[set[int]] = []
    monkeypatch.setattr(cores, "near_cores", lambda _gpu: near)
    monkeypatch.setattr(cores, "CORES", Path("/nowhere"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2, 3})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _pid, allowed: chosen.append(allowed))
    cores.keep_to_cores(0, share=1, shares=2)
    assert chosen == [kept]


def test_a_real_process_is_pinned_to_its_half_of_the_cores() -> None:
    printed = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert printed.stdout.strip() == str(sorted(part(os.sched_getaffinity(0), 1, 2) or os.sched_getaffinity(0)))


@given(st.sets(st.integers(0, 300), min_size=1), st.integers(1, 16))
def test_parts_cover_all_cores_once_and_are_equal(allowed: set[int], shares: int) -> None:
    parts = [part(allowed, share, shares, Path("/nowhere")) for share in range(shares)]
    assert sorted(core for share in parts for core in share) == sorted(allowed)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_threads_of_one_core_share_a_part(tmp_path: Path) -> None:
    for core in range(8):  # as Linux counts them: first one of each core, then the others
        topology = tmp_path / f"cpu{core}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{core % 4},{core % 4 + 4}\n")
    assert part(range(8), 0, 2, tmp_path) == {0, 4, 1, 5}
    assert part(range(8), 1, 2, tmp_path) == {2, 6, 3, 7}


@given(st.sets(st.integers(0, 200), min_size=1))
def test_lists_of_cores_are_read_as_linux_writes_them(allowed: set[int]) -> None:
    ranges: list[list[int]] = []
    for core in sorted(allowed):
        if ranges and ranges[-1][-1] == core - 1:
            ranges[-1][1:] = [core]
        else:
            ranges.append([core])
    assert cores_in(",".join("-".join(map(str, bounds)) for bounds in ranges) + "\n") == allowed
