"""Reads the files of a run's directory."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from trainer.errors import DataError
from trainer.records.files.records import (
    CONFIG,
    METRICS,
    METRICS_ROWS,
    SAMPLE_ROWS,
    SAMPLES,
    WAITS,
    WAITS_ROWS,
    MetricsRow,
    SampleRow,
    WaitsRow,
    read_records,
)
from trainer.records.files.regular import read_regular
from trainer.records.files.sealed import first_complaint
from trainer.records.trajectories import FOLDER, VALIDATIONS, TrajectoryRow, read_trajectories, recorded_steps

_STEPS_OF_SAMPLES = 3  # a page shows the samples of this many steps: the first, one in the middle, the last

_EXTREMES = 3
_MOST_SETTINGS = 2**26  # bytes
_SETTINGS: TypeAdapter[dict[str, dict[str, Any]]] = TypeAdapter(dict[str, dict[str, Any]])


@dataclass(frozen=True)
class RecordedRun:
    """One row of metrics per step, the samples, and the settings."""

    name: str
    rows: list[MetricsRow]
    samples: list[SampleRow]
    config: dict[str, dict[str, Any]]
    extremes: list[TrajectoryRow] = field(default_factory=list)
    """The trajectories with the highest and the lowest rewards of the last recorded step."""
    waits: list[WaitsRow] = field(default_factory=list)
    """Of each step: how long the workers of each role waited for the slowest of them, and which one that was."""
    notes: list[str] = field(default_factory=list)
    """What of the files is no record."""

    def series(self, metric: str) -> tuple[list[float], list[float]]:
        """Steps and values of one metric, at the steps that measured it."""
        points = [(row["step"], row[metric]) for row in self.rows if metric in row]
        return [step for step, _ in points], [value for _, value in points]

    def mean_seconds(self, phase: str) -> float:
        """Seconds of a phase per step, mean over all steps."""
        rows = [row for row in self.rows if "time/step" in row]
        return sum(row.get(f"time/{phase}", 0.0) for row in rows) / max(1, len(rows))

    def names(self, prefix: str) -> list[str]:
        """The metrics of the run that start so, in alphabetical order."""
        return sorted({name for row in self.rows for name in row if name.startswith(prefix)})

    def shown_samples(self) -> list[tuple[int, list[SampleRow]]]:
        """The samples of the first step, of one in the middle and of the last."""
        steps = sorted({sample["step"] for sample in self.samples})
        if not steps:
            return []
        last = _STEPS_OF_SAMPLES - 1
        chosen = sorted({steps[round(place * (len(steps) - 1) / last)] for place in range(_STEPS_OF_SAMPLES)})
        return [(step, [sample for sample in self.samples if sample["step"] == step]) for step in chosen]


def read_run(run_dir: Path) -> RecordedRun:
    """The run in this directory. Raises DataError if there are no metrics, or if a file cannot be read."""
    if not (run_dir / METRICS).is_file():
        raise DataError(f"{run_dir}: no {METRICS} there", hint="name the directory of a run, such as runs/ID")
    settings = read_settings(run_dir)
    notes: list[str] = []
    rows = read_records(run_dir / METRICS, METRICS_ROWS, notes.append)
    if not rows:
        why = f": {notes[0]}" if notes else ""
        raise DataError(f"{run_dir / METRICS}: no step was finished{why}", hint="name a run that finished a step")
    samples = read_records(run_dir / SAMPLES, SAMPLE_ROWS, notes.append)
    waits = read_records(run_dir / WAITS, WAITS_ROWS, notes.append)
    extremes = _extremes(trajectories_of(settings, run_dir))
    return RecordedRun(run_dir.resolve().name, rows, samples, settings, extremes, waits, notes)


def _extremes(directory: Path) -> list[TrajectoryRow]:
    if not recorded_steps(directory):
        return []
    ordered = sorted(read_trajectories(directory), key=lambda row: row["reward"], reverse=True)
    return ordered if len(ordered) <= 2 * _EXTREMES else [*ordered[:_EXTREMES], *ordered[-_EXTREMES:]]


def read_settings(run_dir: Path) -> dict[str, dict[str, Any]]:
    """The recorded settings of a run, by section; empty if it recorded none. Raises DataError if they are damaged."""
    config = run_dir / CONFIG
    if not config.exists():
        return {}
    try:
        return _SETTINGS.validate_json(read_regular(config, _MOST_SETTINGS), strict=True)
    except (OSError, ValidationError) as error:
        why = first_complaint(error) if isinstance(error, ValidationError) else error
        raise DataError(f"{config}: damaged: {why}", hint="delete it; the page will lack the settings") from error


def recorded_trajectories(run_dir: Path, step: int | None = None, validation: bool = False) -> list[TrajectoryRow]:
    """The trajectories of a run's step, or of the validation after it; the last recorded one if `step` is None.

    Raises DataError.
    """
    return read_trajectories(trajectories_of(read_settings(run_dir), run_dir, validation), step)


def trajectories_of(settings: Mapping[str, Mapping[str, Any]], run_dir: Path, validation: bool = False) -> Path:
    """The directory of a run's trajectories, or of those of its validations, by its recorded settings."""
    setting, folder = ("validation_dir", VALIDATIONS) if validation else ("dir", FOLDER)
    trajectories = settings.get("trainer", {}).get("trajectories")
    directory = trajectories.get(setting) if isinstance(trajectories, Mapping) else None
    return Path(directory) if directory and isinstance(directory, str) else run_dir / folder


def median(values: Sequence[float]) -> float:
    """The median; 0 if there are no values."""
    return statistics.median(values) if values else 0.0
