"""What kind of device a rank computes on."""

import platform
from pathlib import Path

import torch


def device_kind(device: torch.device) -> str:
    """The device's name. On CPU also the instruction set and the number of threads, which decide how sums are split."""
    if device.type != "cpu":
        return str(torch.cuda.get_device_name(device))
    return f"{cpu_name()}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The name of this machine's processor, or its architecture where Linux tells no name."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
