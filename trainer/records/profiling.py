"""Traces of chosen steps, one per rank, and warnings about slow phases."""

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch

from trainer.config.sections.trainer import ProfilerConfig


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


class SlowPhases:
    """Finds phases that take longer than their threshold: a setting, or a multiple of the run's own median."""

    MULTIPLE = 2.0
    STEPS = 3  # before a median says anything

    def __init__(self, settings: ProfilerConfig) -> None:
        self._thresholds = {
            "time/load": settings.loading_ms,
            "time/old_log_prob": settings.actor_forward_ms,
            "time/update_critic": settings.critic_update_ms,
        }
        self._earlier: dict[str, list[float]] = {name: [] for name in self._thresholds}

    def of_step(self, seconds: Mapping[str, float]) -> list[str]:
        """A sentence for each slow phase of the next step; the keys of `seconds` are `time/<phase>`."""
        warnings = []
        for name, threshold in self._thresholds.items():
            if name not in seconds:
                continue
            earlier, taken = self._earlier[name], seconds[name] * 1000
            limit = threshold
            if limit is None and len(earlier) >= self.STEPS:
                limit = self.MULTIPLE * median(earlier)
            if limit is not None and taken > limit:
                warnings.append(f"{name.removeprefix('time/')} took {taken:.0f} ms, the threshold is {limit:.4g} ms")
            earlier.append(taken)
        return warnings
