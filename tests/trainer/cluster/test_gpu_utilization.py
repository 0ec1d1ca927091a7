"""How busy GPUs are. NVML is a fake, because the real one needs NVIDIA's driver; AMD's files are a recorded tree."""

import sys
import threading
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


class Clock:
    """Time that passes only while the sampler sleeps, which lasts until the test lets it pass."""

    def __init__(self) -> None:
        self.now = 0.0
        self._sleeping, self._over = threading.Semaphore(0), threading.Semaphore(0)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self._sleeping.release()
        self._over.acquire()
        self.now += seconds

    def let_pass(self, intervals: int) -> None:
        """Returns once the sampler has taken a sample after each interval."""
        for _ in range(intervals):
            assert self._sleeping.acquire(timeout=10)
            self._over.release()
        assert self._sleeping.acquire(timeout=10)
        self._sleeping.release()


def test_a_mean_covers_the_last_seconds_only(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, shares = Clock(), iter([1.0, 0.75, 0.5])
    monkeypatch.setattr(gpu_utilization, "time", clock)
    sampler = GpuSampler(lambda: {"0": next(shares)})
    clock.let_pass(2)
    assert sampler.mean(gpu_utilization.INTERVAL / 2) == {"0": 0.5}
    assert sampler.mean(60.0) == {"0": 0.75}
