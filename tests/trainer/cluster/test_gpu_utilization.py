"""How busy GPUs are. NVML is a fake, because the real one needs NVIDIA's driver; AMD's files are a recorded tree."""

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainer.cluster import gpu_utilization
from trainer.cluster.gpu_utilization import GpuSampler, find_reader


class PlayedError(Exception):
    pass


def fake_nvml(monkeypatch: pytest.MonkeyPatch, *percent: int | None) -> None:
    """A fake NVML with a GPU for each number; one with None does not tell, like a part of a GPU."""

    def rates(gpu: int) -> SimpleNamespace:
        if percent[gpu] is None:
            raise PlayedError("not supported")
        return SimpleNamespace(gpu=percent[gpu])

    module = SimpleNamespace(
        NVMLError=PlayedError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: len(percent),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda gpu: f"GPU-{gpu}",
        nvmlDeviceGetUtilizationRates=rates,
    )
    monkeypatch.setitem(sys.modules, "pynvml", module)


def test_gpus_are_read_by_number_and_by_uuid_mocked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_nvml(monkeypatch, 80, None, 20)
    read = find_reader(tmp_path)
    assert read is not None
    assert read() == {"0": 0.8, "GPU-0": 0.8, "2": 0.2, "GPU-2": 0.2}


def test_a_machine_without_gpus_has_no_reader(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_driver() -> None:
        raise PlayedError("driver not loaded")

    fake_nvml(monkeypatch)
    assert find_reader(tmp_path) is None
    monkeypatch.setattr(sys.modules["pynvml"], "nvmlInit", no_driver)
    assert find_reader(tmp_path) is None
    assert GpuSampler(find_reader(tmp_path)).mean(1.0) == {}


def write_amd(root: Path, *gpus: tuple[int, str]) -> None:
    """The driver's nodes: a CPU first, then GPUs with the number of their render node and their busy percentage."""
    nodes = root / gpu_utilization.TOPOLOGY
    for number, (minor, percent) in enumerate([(0, ""), *gpus]):
        (nodes / str(number)).mkdir(parents=True)
        text = f"cpu_cores_count 64\nsimd_count {304 if minor else 0}\ndrm_render_minor {minor}\n"
        (nodes / str(number) / "properties").write_text(text)
        if percent:
            device = root / gpu_utilization.RENDER_NODES / f"renderD{minor}" / "device"
            device.mkdir(parents=True)
            (device / "gpu_busy_percent").write_text(percent)


def test_amds_gpus_are_numbered_as_the_driver_lists_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    write_amd(tmp_path, (136, "97\n"), (128, "3\n"), (144, "damaged\n"))
    read = find_reader(tmp_path)
    assert read is not None
    assert read() == {"0": 0.97, "1": 0.03}


def test_a_mean_covers_the_last_seconds_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_utilization, "INTERVAL", 0.01)
    value = [1.0]
    sampler = GpuSampler(lambda: {"0": value[0]})
    time.sleep(0.2)
    value[0] = 0.5
    time.sleep(0.3)
    assert sampler.mean(0.1) == {"0": 0.5}
    assert 0.5 < sampler.mean(60.0)["0"] < 1.0
