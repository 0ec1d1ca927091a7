"""Measures the devices of each node: matrix products, memory, copies from and to the host, sums over a node's GPUs.
Asks NVIDIA's driver for their health, and compares them with each other and with data sheets.

Needs Ray and torch, which the images have, and a running cluster. One process per node measures its devices in turn,
a few seconds each; the nodes measure at the same time.
"""

import math
import statistics
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

PATIENCE = 120.0
"""Seconds for all nodes; importing torch takes most of it on a busy file system."""
ROUNDS = 5
"""The fastest of so many rounds counts: what a device can do, whatever else ran at the same time."""
ROUND = 0.2
"""Seconds that a round lasts at least. A container's CPU limit counts per 0.1 s, and a device that is hot or short of
power may be fast for some milliseconds: a shorter round would measure the burst."""
WIDTH = {"gpu": 8192, "cpu": 1024}
"""Of the square matrices."""
BUFFER = {"gpu": 2**30, "cpu": 2**26}
"""Bytes in the buffers of copies."""
SLOW = {"gpu": 0.85, "cpu": 0.5}
"""A device is slow below this share of the median. Cores are shared with other work, GPUs are not."""
REACHABLE = 0.6
"""Share of the data sheet that any healthy chip reaches; powers and clocks of good ones differ by less."""
UNITS = {
    "matrix": "TFLOP/s in matrix products",
    "memory": "GB/s in its memory",
    "to_device": "GB/s from the host",
    "to_host": "GB/s to the host",
    "between": "GB/s between the node's GPUs",
}
_DATA_SHEETS = Path(__file__).parents[2] / "images" / "chips.toml"
"""Its first lines describe the fields."""
_THROTTLED = {0x08: "hardware slowdown", 0x20: "heat", 0x40: "heat", 0x80: "the power supply"}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons that a healthy GPU does not show.
https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html"""


@dataclass(frozen=True)
class DeviceSpeed:
    """The measurement of one device. `between` is the bus bandwidth of a sum over all GPUs of the node; what does not
    apply is 0."""

    host: str
    device: str
    name: str
    matrix: float
    memory: float
    to_device: float = 0.0
    to_host: float = 0.0
    between: float = 0.0


class Node:
    """A Ray actor that measures the devices of its node."""

    def health(self) -> list[str]:
        """The problems that the driver reports. Asked first, while no process of this job uses the GPUs."""
        try:
            import pynvml
        except ImportError:  # AMD's images lack it
            return []
        return gpu_health(pynvml)

    def measure(self) -> list[dict[str, Any]]:
        """The fields of a DeviceSpeed for each device."""
        import torch

        if not torch.cuda.is_available():
            return [{"device": "cpu", "name": "", **_compute(torch.device("cpu"), "cpu")}]
        devices = [torch.device(index) for index in range(torch.cuda.device_count())]
        between = _between(devices)
        return [
            {
                "device": f"gpu {device.index}",
                "name": torch.cuda.get_device_name(device),
                **_compute(device, "gpu"),
                **_copies(device),
                "between": between,
            }
            for device in devices
        ]


def _compute(device: Any, kind: str) -> dict[str, float]:
    import torch

    width, dtype = WIDTH[kind], torch.bfloat16 if kind == "gpu" else torch.float32
    left, right = (torch.randn(width, width, dtype=dtype, device=device) for _ in range(2))
    product = torch.empty(width, width, dtype=dtype, device=device)
    source, target = (torch.empty(BUFFER[kind], dtype=torch.uint8, device=device) for _ in range(2))
    return {
        "matrix": 2 * width**3 / _fastest(lambda: torch.mm(left, right, out=product), device) / 1e12,
        # A copy reads and writes each byte.
        "memory": 2 * BUFFER[kind] / _fastest(lambda: target.copy_(source), device) / 1e9,
    }


def _copies(device: Any) -> dict[str, float]:
    import torch

    size = BUFFER["gpu"]
    there = torch.empty(size, dtype=torch.uint8, device=device)
    here = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    return {
        "to_device": size / _fastest(lambda: there.copy_(here, non_blocking=True), device) / 1e9,
        "to_host": size / _fastest(lambda: here.copy_(there, non_blocking=True), device) / 1e9,
    }


def _between(devices: Sequence[Any]) -> float:
    import torch
    from torch.cuda import nccl

    if len(devices) < 2:
        return 0.0
    size = BUFFER["gpu"] // 4
    buffers = [torch.ones(size, dtype=torch.float32, device=device) for device in devices]

    def add() -> None:
        nccl.all_reduce(buffers)
        for device in devices:
            torch.cuda.synchronize(device)

    share = 2 * (len(devices) - 1) / len(devices)
    return share * BUFFER["gpu"] / _fastest(add, devices[0]) / 1e9


def _fastest(action: Callable[[], object], device: Any) -> float:
    """Seconds per action in the fastest round. Two actions before are not counted: one to warm up, one to find how
    many make a round."""
    import torch

    def seconds(count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            action()
        if device.type != "cpu":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - begin) / count

    seconds(1)
    count = math.ceil(ROUND / seconds(1))
    return min(seconds(count) for _ in range(ROUNDS))


Actor = ray.remote(num_cpus=0)(Node)


@dataclass(frozen=True)
class Measurement:
    """The devices of all nodes, and by host the problems that the driver reports."""

    devices: list[DeviceSpeed]
    health: dict[str, list[str]]


def measure(nodes: Sequence[Mapping[str, Any]]) -> Measurement:
    """Measures all nodes at the same time.

    Raises ray.exceptions.RayError if a node fails, its GetTimeoutError if one hangs.
    """
    actors = [
        Actor.options(
            num_gpus=int(node["Resources"].get("GPU", 0)),
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        ).remote()
        for node in nodes
    ]
    try:
        health = ray.get([actor.health.remote() for actor in actors], timeout=PATIENCE)
        measured = ray.get([actor.measure.remote() for actor in actors], timeout=PATIENCE)
    finally:
        for actor in actors:
            ray.kill(actor)
    hosts = [node["NodeManagerHostname"] for node in nodes]
    devices = [
        DeviceSpeed(host=host, **_rounded(device))
        for host, speeds in zip(hosts, measured, strict=True)
        for device in speeds
    ]
    return Measurement(devices, {host: speeds for host, speeds in zip(hosts, health, strict=True) if speeds})


def _rounded(device: Mapping[str, Any]) -> dict[str, Any]:
    return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in device.items()}


def gpu_health(nvml: ModuleType) -> list[str]:
    """The problems of all GPUs, like `gpu 3: 2 uncorrected memory errors since the driver started`.

    `nvml` is the module pynvml. Nothing is reported of what a GPU does not support.
    """
    try:
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError:
        return []
    return [
        f"gpu {index}: {problem}"
        for index in range(count)
        for problem in _driver_problems(nvml, nvml.nvmlDeviceGetHandleByIndex(index))
    ]


def _driver_problems(nvml: ModuleType, gpu: Any) -> Iterator[str]:
    def asked(function: str, *arguments: object) -> Any:
        try:
            return getattr(nvml, function)(gpu, *arguments)
        except nvml.NVMLError:
            return None

    uncorrected, volatile = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    if errors := asked("nvmlDeviceGetTotalEccErrors", uncorrected, volatile):
        yield f"{errors} uncorrected memory errors since the driver started"
    if rows := asked("nvmlDeviceGetRemappedRows"):
        _, _, pending, failed = rows
        if failed:
            yield "its memory has more broken rows than it can replace: have it exchanged"
        elif pending:
            yield "a broken row of its memory waits for a reset of the GPU to be replaced"
    reasons = asked("nvmlDeviceGetCurrentClocksEventReasons") or 0
    if causes := sorted({cause for bit, cause in _THROTTLED.items() if reasons & bit}):
        yield f"its clocks are lowered by {' and '.join(causes)}"
    if processes := asked("nvmlDeviceGetComputeRunningProcesses"):
        yield f"{len(processes)} other programs use it"


@dataclass(frozen=True)
class Chip:
    """The data sheet of a chip."""

    names: tuple[str, ...]
    matrix: float
    """TFLOP/s."""
    memory: float
    """GB/s."""
    source: str
    link: float = 0.0
    """GB/s."""


@cache
def chips() -> tuple[Chip, ...]:
    rows = tomllib.loads(_DATA_SHEETS.read_text(encoding="utf-8"))["chips"]
    return tuple(Chip(**{**row, "names": tuple(row["names"])}) for row in rows)


def chip_of(name: str) -> Chip | None:
    """The row of a device, or None for one that the table lacks."""
    return next((chip for chip in chips() if any(part in name for part in chip.names)), None)


def problems(speeds: Sequence[DeviceSpeed]) -> dict[str, list[str]]:
    """Slow devices by host: far below the median of their kind, or far below their chip's data sheet."""
    slow: dict[str, list[str]] = {}
    for speed in speeds:
        alike = [other for other in speeds if other.name == speed.name]
        chip = chip_of(speed.name)
        for quantity, unit in UNITS.items():
            value = getattr(speed, quantity)
            if problem := _problem(quantity, value, [getattr(other, quantity) for other in alike], chip, speed.device):
                slow.setdefault(speed.host, []).append(f"{speed.device}: {value:g} {unit}, {problem}")
    return slow


def _problem(quantity: str, value: float, alike: Sequence[float], chip: Chip | None, device: str) -> str:
    usual, sheet = statistics.median(alike), getattr(chip, quantity, None)
    if len(alike) > 1 and value < SLOW[device.split()[0]] * usual:
        return f"and {usual:g} is usual here"
    if sheet is not None and value < REACHABLE * sheet:
        return f"of {sheet:g} in the data sheet"
    return ""


def lines(speeds: Sequence[DeviceSpeed]) -> list[str]:
    """A line per device."""
    return [
        f"{speed.host}  {speed.device}  {speed.name}  ".replace("    ", "  ")
        + ", ".join(f"{getattr(speed, name):g} {unit}" for name, unit in UNITS.items() if getattr(speed, name))
        for speed in speeds
    ]


def document(measurement: Measurement) -> dict[str, Any]:
    """For JSON: the devices, their data sheets by name, what is slow, and what the driver reports, by host."""
    devices = [asdict(speed) for speed in measurement.devices]
    sheets = {
        name: asdict(chip) for name in sorted({speed.name for speed in measurement.devices}) if (chip := chip_of(name))
    }
    return {
        "devices": devices,
        "data_sheets": sheets,
        "slow": problems(measurement.devices),
        "health": measurement.health,
    }
