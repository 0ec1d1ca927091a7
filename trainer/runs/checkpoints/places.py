"""Where a run lies, and where it continues."""

import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from trainer.config.sections.trainer import TrainerConfig
from trainer.config.tree import RunConfig
from trainer.errors import ConfigError
from trainer.runs.checkpoints.checkpoint import CHECKPOINTS, last_checkpoint
from trainer.runs.checkpoints.manifest import TrainingState

logger = logging.getLogger(__name__)

C = TypeVar("C", bound=RunConfig)


def run_directory(settings: TrainerConfig) -> Path:
    """The run's directory: `output_dir/run_id`, the resumed run's directory, or one named after the time.

    A run that only validates has one of its own: it must change nothing of the run that it measures. Raises ConfigError
    if it is not clear which run a checkpoint continues.
    """
    now = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    if settings.validate_only and settings.resumes_itself:
        return settings.output_dir / f"{settings.run_id}-validated-{now}"
    if settings.run_id is None and settings.checkpoint is not None and not settings.validate_only:
        return _run_of(settings.checkpoint, settings)
    return settings.output_dir / (settings.run_id or now)


def _run_of(checkpoint: Path, settings: TrainerConfig) -> Path:
    folder, run_dir = checkpoint.parent, checkpoint.parent.parent
    if folder.name != CHECKPOINTS:
        raise ConfigError(
            f"{checkpoint} is not in the {CHECKPOINTS} folder of a run, so it is not clear which run goes on",
            hint="name the run that continues from it: trainer.run_id=NAME",
        )
    return settings.output_dir / run_dir.name if run_dir.parent == settings.spare_dir else run_dir


def run_directories(settings: TrainerConfig, run_dir: Path) -> list[Path]:
    """Where the run's checkpoints may lie: its directory, then the one of the same name in `trainer.spare_dir`."""
    return [run_dir] if settings.spare_dir is None else [run_dir, settings.spare_dir / run_dir.name]


def with_last_checkpoint(config: C) -> C:
    """The settings with `trainer.resume=auto` replaced by the run's last whole checkpoint, or by None without one."""
    settings = config.trainer
    if not settings.resumes_itself:
        return config
    assert settings.run_id is not None, "the settings refuse it"
    checkpoint = last_checkpoint(*run_directories(settings, settings.output_dir / settings.run_id))
    logger.info("trainer.resume=auto: %s", checkpoint or "no checkpoint yet, the run starts anew")
    return config.model_copy(update={"trainer": settings.model_copy(update={"resume": checkpoint})})


def recorded_step(
    settings: TrainerConfig, run_dir: Path, resumed: TrainingState | None, again: bool = False
) -> int | None:
    """Last step to keep in the run's records; -1 truncates everything, None starts fresh.

    `settings` are the user's own: with `trainer.resume=auto` and no checkpoint yet, all steps are recorded again.
    `again`: this process has begun the run before, so the records are the run's own, whatever checkpoint it is from.
    """
    if settings.validate_only:
        return None
    checkpoint = settings.checkpoint
    continues = checkpoint is not None and checkpoint.parent.parent in run_directories(settings, run_dir)
    if not (again or continues or settings.resumes_itself):
        return None
    return -1 if resumed is None else resumed.step
