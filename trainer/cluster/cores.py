"""Binds a process to the cores next to its GPU.

Otherwise the kernel moves the processes of several GPUs over all cores, away from their caches and memory.
"""

import logging
import os
from collections.abc import Iterable
from pathlib import Path

logger = logging.getLogger(__name__)

CORES = Path("/sys/devices/system/cpu")
WORD = 64  # bits


def keep_to_cores(gpu: int | str, share: int, shares: int) -> None:
    """Binds this process and its future children to the cores next to a GPU, given by its NVML index.

    If all cores are equally near, or NVML does not know, binds to part `share` of `shares` equal parts of the cores.
    """
    allowed = os.sched_getaffinity(0)
    near = near_cores(gpu) & allowed
    chosen = near if near and near != allowed else part(allowed, share, shares)
    if chosen and chosen != allowed:
        os.sched_setaffinity(0, chosen)
        logger.info("GPU %s: %d of %d cores, from %d on", gpu, len(chosen), len(allowed), min(chosen))


def near_cores(gpu: int | str) -> set[int]:
    """The cores next to an NVIDIA GPU; empty if NVML does not know them or `gpu` is not an index."""
    try:
        import pynvml
    except ImportError:  # vLLM brings it where there are NVIDIA GPUs
        return set()
    if not str(gpu).isdigit():
        return set()
    try:
        pynvml.nvmlInit()
        device = pynvml.nvmlDeviceGetHandleByIndex(int(gpu))
        words = pynvml.nvmlDeviceGetCpuAffinity(device, -(-os.sysconf("SC_NPROCESSORS_CONF") // WORD))
    except pynvml.NVMLError as error:
        logger.warning("NVML does not report the cores next to GPU %s: %s", gpu, error)
        return set()
    return {WORD * place + bit for place, word in enumerate(words) for bit in range(WORD) if word >> bit & 1}


def part(cores: Iterable[int], share: int, shares: int, described: Path | None = None) -> set[int]:
    """Part `share` of `shares` equal parts of neighbouring cores; a core's hardware threads stay together."""

    def place(core: int) -> tuple[int, int]:
        siblings = (described or CORES) / f"cpu{core}" / "topology" / "thread_siblings_list"
        return min(cores_in(siblings.read_text())) if siblings.exists() else core, core

    ordered = sorted(cores, key=place)
    return set(ordered[len(ordered) * share // shares : len(ordered) * (share + 1) // shares])


def cores_in(text: str) -> set[int]:
    """The cores in a Linux list such as `0-3,8` (cpuset(7), List format)."""
    ranges = [piece.split("-") for piece in text.strip().split(",")]
    return {core for ends in ranges for core in range(int(ends[0]), int(ends[-1]) + 1)}
