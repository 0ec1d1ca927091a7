"""Monitors of a run's GPUs: real processes of Ray on a node that claims two GPUs, whose NVML is a fake module."""

import signal
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.trainer.cluster.misbehaving import Worker
from tests.trainer.ray_node import ray_node
from trainer.cluster import monitors
from trainer.cluster.monitors import GpuMonitors
from trainer.cluster.nodes import Slot, find_nodes, reserve_slots
from trainer.cluster.workers import WorkerGroup

NVML = """
class NVMLError(Exception): pass
def nvmlInit(): pass
def nvmlDeviceGetCount(): return 2
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetUUID(gpu): return f"GPU-{gpu}"
class Rates:
    def __init__(self, gpu): self.gpu = [90, 30][gpu]
nvmlDeviceGetUtilizationRates = Rates
"""


@pytest.fixture(scope="module")
def slots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Slot]]:
    """The slots of both GPUs."""
    modules = tmp_path_factory.mktemp("modules")
    (modules / "pynvml.py").write_text(NVML)
    with ray_node(modules, num_gpus=2):
        yield reserve_slots(find_nodes(1, 2), 2, timeout=60)


def group_on(slots: list[Slot]) -> WorkerGroup[Worker]:
    group = WorkerGroup[Worker]("actor", timeout=120)
    for slot in slots:
        group.add(slot, Worker, {}, gpus=0.5)
    group.call(Worker.echo, "up")
    return group


def first(gpu_monitors: GpuMonitors, gpus: int) -> list[float]:
    """The first measurement of all GPUs; the monitor's process may still start, and each worker says its GPU later."""
    deadline = time.monotonic() + 60
    while len(shares := gpu_monitors.utilization(60.0)) < gpus:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return shares


def monitor() -> psutil.Process:
    """The youngest monitor among this process's children."""
    living = [child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]
    titled = [child for child in living if " ".join(child.cmdline()).startswith("ray::MonitorWorker")]
    return max(titled, key=psutil.Process.create_time)


def test_the_gpus_that_ray_gave_the_workers_are_watched_mocked(slots: list[Slot]) -> None:
    group = group_on(slots)
    assert sorted(first(GpuMonitors([group]), gpus=2)) == [0.3, 0.9]


def test_gpus_of_others_on_the_node_do_not_count_mocked(slots: list[Slot]) -> None:
    group = group_on(slots[1:])
    assert first(GpuMonitors([group, group]), gpus=1) == [0.3]


def test_a_dead_monitor_is_named_once_and_the_run_goes_on_mocked(
    slots: list[Slot], caplog: pytest.LogCaptureFixture
) -> None:
    gpu_monitors = GpuMonitors([group_on(slots)])
    first(gpu_monitors, gpus=2)
    monitor().kill()
    deadline = time.monotonic() + 60
    while gpu_monitors.utilization(60.0):  # Ray notices the death after a moment
        assert time.monotonic() < deadline
    assert gpu_monitors.utilization(60.0) == []
    assert caplog.text.count(f"gpu/utilization lacks {slots[0].node.address} from now on") == 1


def test_a_monitor_that_hangs_is_waited_for_once_mocked(slots: list[Slot], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitors, "PATIENCE", 0.5)
    gpu_monitors = GpuMonitors([group_on(slots)])
    first(gpu_monitors, gpus=2)
    process = monitor()
    process.send_signal(signal.SIGSTOP)
    assert gpu_monitors.utilization(60.0) == []
    monkeypatch.setattr(monitors, "PATIENCE", 600.0)  # longer than the test may take
    assert gpu_monitors.utilization(60.0) == []
    process.send_signal(signal.SIGCONT)
    assert sorted(first(gpu_monitors, gpus=2)) == [0.3, 0.9]
