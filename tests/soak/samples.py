"""What the processes of a job hold, and how it grows."""

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from tests.process_table import description

KINDS = {
    "controller": r"-m trainer train",
    "actor": r"^ray::ActorWorke",
    "critic": r"^ray::CriticWork",
    "reference": r"^ray::ReferenceW",
    "engines": r"^ray::RolloutWor|VLLM|EngineCore",
    "rewards": r"^ray::RewardWork",
    "raylet, GCS": r"^(raylet|gcs_server) ",
    "launch": r"-m entrypoints",
}
"""Whose memory is summed; all other processes are `others`."""
MIB = 2**20


def sample(pids: Iterable[int], files: Iterable[Path]) -> dict[str, float]:
    """Memory in MiB by kind of process, and numbers of processes, descriptors and new files; shared memory in MiB."""
    values = {f"{kind}, MiB": 0.0 for kind in (*KINDS, "others")}
    values |= {"processes": 0.0, "descriptors": 0.0}
    for pid in pids:
        with suppress(OSError):
            held = memory(pid)
            values["descriptors"] += len(list(Path(f"/proc/{pid}/fd").iterdir()))
            values["processes"] += 1
            values[f"{kind_of(description(pid))}, MiB"] += held
    sizes = [size for root in files for size in _sizes(root)]
    return {
        **{name: round(value, 1) for name, value in values.items()},
        "files in /tmp and /dev/shm": float(len(sizes)),
        "their size, MiB": round(sum(sizes) / MIB, 1),
    }


def memory(pid: int) -> float:
    """The process's share of memory in MiB; pages that n processes map count as 1/n."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    match = re.search(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE)
    return int(match[1]) / 1024 if match else 0.0


def kind_of(process: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, process)), "others")


def _sizes(root: Path) -> list[int]:
    """Bytes on disk of the files under a path."""
    sizes = []
    for path in [root, *(root.rglob("*") if root.is_dir() else ())]:
        with suppress(OSError):
            if path.is_file() and not path.is_symlink():
                sizes.append(path.stat().st_blocks * 512)
    return sizes


def growth(stretches: Sequence[tuple[Sequence[float], Sequence[float]]]) -> tuple[float, float]:
    """Level and growth per hour of a quantity: medians over stretches (seconds, values) that no fault interrupts.

    The growth is the median slope of all pairs within a stretch (Theil 1950, Sen 1968); nan without pairs.
    """
    levels, slopes = [], []
    for seconds, values in stretches:
        at, value = np.asarray(seconds), np.asarray(values)
        earlier, later = np.triu_indices(len(at), k=1)
        levels.append(value)
        slopes.append((value[later] - value[earlier]) / (at[later] - at[earlier]) * 3600)
    together = np.concatenate(slopes) if slopes else np.empty(0)
    if not together.size:
        return float("nan"), float("nan")
    return float(np.median(np.concatenate(levels))), float(np.median(together))
