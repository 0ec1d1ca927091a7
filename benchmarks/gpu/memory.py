"""GPU memory that all processes together use in each phase of a step."""

import os
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

INTERVAL = 0.05  # seconds between two looks
EDGE = 0.15  # share of a phase left out at either end: a step's end is known to about half a second


class MemorySampler:
    """A context manager that polls the visible GPUs, or the node's memory on a host without GPUs."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Self:
        self._read = _reader()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def peaks(self, steps: Sequence[tuple[float, Mapping[str, float]]]) -> dict[str, float]:
        """Peak GiB of the fullest GPU in each phase over some steps.

        A step is the time at which it ended and the seconds of its phases, in their order, the last one last.
        """
        peaks: dict[str, float] = {}
        for end, phases in steps:
            for phase, seconds in reversed(phases.items()):
                start = end - seconds
                margin = EDGE * seconds
                used = [gib for when, gib in self._samples if start + margin <= when <= end - margin]
                if used:
                    peaks[phase] = round(max(peaks.get(phase, 0.0), *used), 1)
                end = start
        return peaks

    def _sample(self) -> None:
        while not self._ended.wait(INTERVAL):
            self._samples.append((time.time(), self._read()))


def _reader() -> Any:
    import torch

    if not torch.cuda.is_available():
        import psutil

        return lambda: psutil.virtual_memory().used / 2**30
    import pynvml

    pynvml.nvmlInit()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    handles = [pynvml.nvmlDeviceGetHandleByIndex(int(number)) for number in visible.split(",")]
    return lambda: max(pynvml.nvmlDeviceGetMemoryInfo(handle).used for handle in handles) / 2**30
