"""GPU health as NVIDIA's driver reports it: memory errors, throttling, other programs."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

_THROTTLED = {0x08: "hardware slowdown", 0x20: "heat", 0x40: "heat", 0x80: "the power supply"}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons that a healthy GPU does not show.
https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html"""


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
        for problem in _problems(nvml, nvml.nvmlDeviceGetHandleByIndex(index))
    ]


def _problems(nvml: ModuleType, gpu: Any) -> Iterator[str]:
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
