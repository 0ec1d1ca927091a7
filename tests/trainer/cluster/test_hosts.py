"""The state of a node while workers stall, from the kernel's files and a driver whose answers are made up."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainer.cluster.stalls.gpus import _of_driver, xids
from trainer.cluster.stalls.hosts import held_back, read_counters, read_host


def test_this_node_has_disks_memory_and_an_interface(tmp_path: Path) -> None:
    rows = dict(read_host(read_counters(), tmp_path).rows)
    assert " GiB free" in rows["the run's directory"]
    assert " GiB free" in rows["memory"]
    assert any(name.startswith("network ") and " kB/s in, " in value for name, value in rows.items())


def test_a_disk_is_full_also_while_a_save_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two tries its file is gone for a moment."""
    blocks = iter([1000, 0])
    free = lambda path: next(blocks) if path == tmp_path else 1000  # noqa: E731
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_blocks=1000, f_frsize=2**20, f_bavail=free(path)))
    problems = read_host(read_counters(), tmp_path).problems
    assert "the run's directory is full: 0 MiB of 1000 are free" in problems


@pytest.mark.parametrize(
    ("folder", "line"),
    [
        ("", "throttled_usec 2500000"),
        ("cpu", "throttled_time 2500000000"),
        ("cpu,cpuacct", "throttled_time 2500000000"),
    ],
)
def test_the_time_of_a_cpu_limit_is_read_wherever_control_groups_are_mounted(
    tmp_path: Path, folder: str, line: str
) -> None:
    (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / folder / "cpu.stat").write_text(f"nr_periods 9\nnr_throttled 5\n{line}\n")
    assert held_back(tmp_path) == 2.5


def test_a_driver_that_is_a_mock_reports_errors_clocks_and_links() -> None:
    class NVMLError(Exception):
        pass

    def links(_gpu: object, link: int) -> int:
        if link > 2:
            raise NVMLError
        return 0 if link == 1 else 1

    nvml = SimpleNamespace(
        NVMLError=NVMLError,
        NVML_MEMORY_ERROR_TYPE_UNCORRECTED=1,
        NVML_VOLATILE_ECC=0,
        NVML_NVLINK_MAX_LINKS=18,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetTotalEccErrors=lambda *_: 2,
        nvmlDeviceGetCurrentClocksEventReasons=lambda _: 0x40,
        nvmlDeviceGetNvLinkState=links,
    )
    assert list(_of_driver(nvml)) == [
        "GPU 0: 2 uncorrected memory errors since the driver started",
        "GPU 0: its clocks are lowered by heat",
        "GPU 0: 1 of its NVLink links are down",
    ]


def test_xids_are_read_from_the_kernel_s_log() -> None:
    log = b"6,1,2,-;usb 1-1: new device\n4,2,3,-;NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus.\n"
    assert xids(log) == ["Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus."]
