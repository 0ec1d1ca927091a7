"""Driver reports on this node's GPUs that can explain a hang: errors, lowered clocks, links that are down."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

_THROTTLED = {0x08: "hardware slowdown", 0x20: "heat", 0x40: "heat", 0x80: "the power supply"}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons that a healthy GPU does not show.
https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html"""


def gpu_problems() -> list[str]:
    """The problems of this node's GPUs, like `GPU 3: its clocks are lowered by heat`; empty without NVIDIA's driver."""
    try:
        import pynvml
    except ImportError:
        return []
    problems = list(_of_driver(pynvml))
    return [*problems, *xids(_kernel_log())] if Path("/proc/driver/nvidia").exists() else problems


def xids(log: bytes) -> list[str]:
    """The driver's errors in the kernel's log, the latest three: `Xid (PCI:0000:1b:00): 79, GPU has fallen off`."""
    lines = [line.partition("NVRM: ")[2] for line in log.decode(errors="replace").splitlines() if "NVRM: Xid" in line]
    return lines[-3:]


def _of_driver(nvml: Any) -> Iterator[str]:
    try:
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError:
        return
    for index in range(count):
        try:
            gpu = nvml.nvmlDeviceGetHandleByIndex(index)
        except nvml.NVMLError as error:
            yield f"GPU {index}: {error}"
            continue
        yield from (f"GPU {index}: {problem}" for problem in _problems(nvml, gpu))


def _problems(nvml: Any, gpu: Any) -> Iterator[str]:
    def asked(function: str, *arguments: object) -> Any:
        try:
            return getattr(nvml, function)(gpu, *arguments)
        except (nvml.NVMLError, AttributeError):
            return None

    uncorrected, volatile = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    if errors := asked("nvmlDeviceGetTotalEccErrors", uncorrected, volatile):
        yield f"{errors} uncorrected memory errors since the driver started"
    reasons = asked("nvmlDeviceGetCurrentClocksEventReasons") or 0
    if causes := sorted({cause for bit, cause in _THROTTLED.items() if reasons & bit}):
        yield f"its clocks are lowered by {' and '.join(causes)}"
    states = [asked("nvmlDeviceGetNvLinkState", link) for link in range(nvml.NVML_NVLINK_MAX_LINKS)]
    if any(states) and (down := states.count(0)):
        yield f"{down} of its NVLink links are down"


def _kernel_log() -> bytes:
    """The kernel's log, if this process may read it."""
    records = []
    with suppress(OSError):
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
        try:
            while line := os.read(log, 8192):
                records.append(line)
        finally:
            os.close(log)
    return b"".join(records)
