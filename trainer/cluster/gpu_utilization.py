"""How busy a node's GPUs are, sampled beside the run by a small process on each node.

NVIDIA's driver is asked through NVML, AMD's through sysfs, which needs no package.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)

INTERVAL = 0.5  # seconds between two samples; NVML's own cover 0.17 to 1 s
KEPT = 2**15  # samples; the latest four hours

TOPOLOGY, RENDER_NODES = Path("sys/class/kfd/kfd/topology/nodes"), Path("sys/class/drm")

# The share of the last moments in which each GPU computed, by the ids that Ray gives GPUs.
Sample = Mapping[str, float]


class GpuSampler:
    """Samples the GPUs of this node in a thread until the process ends."""

    def __init__(self, read: Callable[[], Sample] | None = None) -> None:
        self._read = read or find_reader(Path("/"))
        self._samples: deque[tuple[float, Sample]] = deque(maxlen=KEPT)
        if self._read is not None:
            threading.Thread(target=self._sample, name="gpu utilization", daemon=True).start()

    def mean(self, seconds: float) -> dict[str, float]:
        """The mean utilisation of each GPU in the last `seconds`; empty without a GPU or a sample."""
        start = time.monotonic() - seconds
        samples = [sample for at, sample in list(self._samples) if at >= start]
        names = {name for sample in samples for name in sample}
        values = {name: [sample[name] for sample in samples if name in sample] for name in names}
        return {name: sum(samples) / len(samples) for name, samples in values.items()}

    def _sample(self) -> None:
        assert self._read is not None
        while True:
            self._samples.append((time.monotonic(), self._read()))
            time.sleep(INTERVAL)


def find_reader(root: Path) -> Callable[[], Sample] | None:
    """How the GPUs of a machine with this root directory are read; None if it has none."""
    return _nvidia() or _amd(root)


def _nvidia() -> Callable[[], Sample] | None:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(at) for at in range(pynvml.nvmlDeviceGetCount())]
        names = [str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    except pynvml.NVMLError:
        return None

    def read() -> Sample:
        shares = {}
        for index, (handle, name) in enumerate(zip(handles, names, strict=True)):
            with suppress(pynvml.NVMLError):  # parts of a GPU (MIG) do not tell
                # Ray names GPUs as CUDA_VISIBLE_DEVICES does: by number or by UUID.
                shares[str(index)] = shares[name] = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
        return shares

    return read if handles else None


def _amd(root: Path) -> Callable[[], Sample] | None:
    files = {str(number): file for number, file in enumerate(_busy_files(root)) if file.is_file()}

    def read() -> Sample:
        shares = {}
        for name, file in files.items():
            with suppress(OSError, ValueError):
                shares[name] = int(file.read_text()) / 100
        return shares

    return read if files else None


def _busy_files(root: Path) -> Iterator[Path]:
    """The file with each GPU's utilisation, in HIP's order of GPUs: that of the driver's nodes, without CPUs."""
    nodes = [node for node in (root / TOPOLOGY).glob("*") if node.name.isdigit()]
    for node in sorted(nodes, key=lambda node: int(node.name)):
        with suppress(OSError, ValueError, KeyError):  # the driver hides the GPUs of other containers
            lines = (node / "properties").read_text().splitlines()
            properties = dict(line.split(maxsplit=1) for line in lines if " " in line)
            if int(properties.get("simd_count", "0")):
                minor = int(properties["drm_render_minor"])
                yield root / RENDER_NODES / f"renderD{minor}" / "device" / "gpu_busy_percent"
