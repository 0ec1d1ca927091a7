"""Where a run lies, and where it continues."""

import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from trainer.config.sections.trainer import TrainerConfig
from trainer.config.tree import RunConfig
from trainer.runs.checkpoints.checkpoint import TrainingState, last_checkpoint

logger = logging.getLogger(__name__)

C = TypeVar("C", bound=RunConfig)


def run_directory(settings: TrainerConfig) -> Path:
    """The run's directory: `output_dir/run_id`, the resumed run's directory, or one named after the time."""
    if settings.run_id is None and settings.checkpoint is not None:
        return settings.checkpoint.parent.parent
    return settings.output_dir / (settings.run_id or datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ"))


def run_directories(settings: TrainerConfig, run_dir: Path) -> list[Path]:
    """Where the run's checkpoints may lie: its directory, then the one of the same name in `trainer.spare_dir`."""
    return [run_dir] if settings.spare_dir is None else [run_dir, settings.spare_dir / run_dir.name]


def with_last_checkpoint(config: C) -> C:
    """The settings with `trainer.resume=auto` replaced by the run's last whole checkpoint, or by None without one."""
    settings = config.trainer
    if not settings.resumes_itself:
        return config
    found = last_checkpoint(*run_directories(settings, run_directory(settings)))
    logger.info("trainer.resume=auto: %s", found or "no checkpoint yet, the run starts anew")
    return config.model_copy(update={"trainer": settings.model_copy(update={"resume": found})})


def recorded_step(settings: TrainerConfig, resumed: TrainingState | None) -> int | None:
    """Last step to keep in the run's records; -1 truncates everything, None starts fresh.

    `settings` are the user's own: with `trainer.resume=auto` and no checkpoint yet, all steps are recorded again.
    """
    if resumed is not None:
        return resumed.step
    return -1 if settings.resumes_itself else None
