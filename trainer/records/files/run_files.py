"""What a run left in its directory, read back."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.errors import DataError
from trainer.records.tracking import CONFIG, METRICS, SAMPLES, WAITS, finished_lines
from trainer.records.trajectories import FOLDER, VALIDATIONS, read_trajectories, recorded_steps

_STEPS_OF_SAMPLES = 3  # a page shows the samples of this many steps: the first, one in the middle, the last

_EXTREMES = 3

Row = dict[str, float]


@dataclass(frozen=True)
class RecordedRun:
    """One row of metrics per step, the samples, and the settings."""

    name: str
    rows: list[Row]
    samples: list[dict[str, Any]]
    config: dict[str, Any]
    extremes: list[dict[str, Any]] = field(default_factory=list)
    """The trajectories with the highest and the lowest rewards of the last recorded step."""
    waits: list[dict[str, Any]] = field(default_factory=list)
    """Of each step: how long the workers of each role waited for the slowest of them, and which one that was."""

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

    def shown_samples(self) -> list[tuple[int, list[dict[str, Any]]]]:
        """The samples of the first step, of one in the middle and of the last."""
        steps = sorted({sample["step"] for sample in self.samples})
        if not steps:
            return []
        last = _STEPS_OF_SAMPLES - 1
        chosen = sorted({steps[round(place * (len(steps) - 1) / last)] for place in range(_STEPS_OF_SAMPLES)})
        return [(step, [sample for sample in self.samples if sample["step"] == step]) for step in chosen]


def read_run(run_dir: Path) -> RecordedRun:
    """The run in this directory. Raises DataError if there are no metrics, or a file is damaged."""
    if not (run_dir / METRICS).is_file():
        raise DataError(f"{run_dir}: no {METRICS} there", hint="name the directory of a run, such as runs/ID")
    settings = read_settings(run_dir)
    # Numbers that are not finite are null in JSON.
    rows = [
        {name: math.nan if value is None else value for name, value in row.items()}
        for row in read_lines(run_dir / METRICS)
    ]
    if not rows:
        raise DataError(f"{run_dir / METRICS}: no step was finished", hint="name a run that finished a step")
    samples = read_lines(run_dir / SAMPLES)
    extremes, waits = _extremes(trajectories_of(settings, run_dir)), read_lines(run_dir / WAITS)
    return RecordedRun(run_dir.resolve().name, rows, samples, settings, extremes, waits)


def _extremes(directory: Path) -> list[dict[str, Any]]:
    if not recorded_steps(directory):
        return []
    ordered = sorted(read_trajectories(directory), key=lambda row: row["reward"], reverse=True)
    return ordered if len(ordered) <= 2 * _EXTREMES else [*ordered[:_EXTREMES], *ordered[-_EXTREMES:]]


def read_settings(run_dir: Path) -> dict[str, Any]:
    """The recorded settings of a run; empty if it recorded none. Raises DataError if the file is damaged."""
    config = run_dir / CONFIG
    try:
        return dict(json.loads(config.read_text(encoding="utf-8"))) if config.is_file() else {}
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{config}: damaged: {error}", hint="delete it; the page will lack the settings") from error


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file with one per line, without an unfinished last line; none if there is no file."""
    if not path.is_file():
        return []
    values = []
    for number, line in enumerate(finished_lines(path), start=1):
        try:
            values.append(json.loads(line))
        except ValueError as error:
            raise DataError(f"{path}, line {number}: damaged: {error}", hint="delete that line") from error
    return values


def recorded_trajectories(run_dir: Path, step: int | None = None, validation: bool = False) -> list[dict[str, Any]]:
    """The trajectories of a run's step, or of the validation after it; the last recorded one if `step` is None.

    Raises DataError.
    """
    return read_trajectories(trajectories_of(read_settings(run_dir), run_dir, validation), step)


def trajectories_of(settings: Mapping[str, Any], run_dir: Path, validation: bool = False) -> Path:
    """The directory of a run's trajectories, or of those of its validations, by its recorded settings."""
    setting, folder = ("validation_dir", VALIDATIONS) if validation else ("dir", FOLDER)
    own = settings.get("trainer", {}).get("trajectories", {}).get(setting)
    return Path(own) if own else run_dir / folder


def median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0
