"""Traces of chosen steps, one per rank, and warnings about slow phases."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trainer.config.trainer import ProfilerConfig


class Tracer:
    """Traces torch in this process between `start` and `stop`."""

    def __init__(self) -> None:
        self._profiler: Any = None

    def start(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities, profile_memory=True)
        self._profiler.start()

    def stop(self, path: Path) -> None:
        """Writes the trace for chrome://tracing or Perfetto."""
        self._profiler.stop()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(path))
        self._profiler = None


def slow_phases(seconds: Mapping[str, float], settings: ProfilerConfig) -> list[str]:
    """A sentence for each phase of a step above its threshold; the keys of `seconds` are `time/<phase>`."""
    limits = {
        "time/load": settings.loading_ms,
        "time/old_log_prob": settings.actor_forward_ms,
        "time/update_critic": settings.critic_update_ms,
    }
    return [
        f"{name.removeprefix('time/')} took {seconds[name] * 1000:.0f} ms, the threshold is {limit:g} ms"
        for name, limit in limits.items()
        if limit is not None and seconds.get(name, 0.0) * 1000 > limit
    ]
