"""A run goes on with new workers from its last checkpoint, after a GPU's memory was full in a training pass (then with
smaller micro-batches) or after ranks died whose copies in memory are lost."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from trainer.config.tree import RunConfig, WorkersConfig
from trainer.errors import LoweredLimit, MemoryFullError, RestartError
from trainer.runs.checkpoints.manifest import TrainingState

logger = logging.getLogger(__name__)

C = TypeVar("C", bound=RunConfig)
R = TypeVar("R")
W = TypeVar("W", bound=WorkersConfig)

MOST_RESTARTS = 4  # of each kind; those for lack of memory about halve the largest micro-batch


def restarted(config: C, run_dir: Path, attempt: Callable[[C, Sequence[LoweredLimit], bool], R]) -> R:
    """The result of `attempt`, which starts the workers and takes the steps.

    It gets the settings, the limits that were lowered so far, and whether this process has begun the run before. After
    a RestartError it is called again, with settings that continue from the run's last checkpoint: ranks that wait for
    the one that failed cannot go on, so all workers are replaced. Raises MemoryFullError if a lower limit cannot help,
    and any RestartError after too many restarts.
    """
    lowered: list[LoweredLimit] = []
    deaths = 0
    while True:
        try:
            return attempt(config, lowered, bool(lowered or deaths))
        except MemoryFullError as error:
            if error.lowered is None or len(lowered) == MOST_RESTARTS:
                raise
            lowered.append(error.lowered)
            how, advice = (
                f" with {lowered[-1]}",
                "; to avoid the restart, set {0.setting}={0.after}".format(lowered[-1]),
            )
            cause, checkpoint = str(error), error.checkpoint
        except RestartError as error:
            deaths += 1
            if deaths > MOST_RESTARTS:
                raise
            how, advice, cause, checkpoint = "", "", str(error), error.checkpoint
        config = continued(config, run_dir, checkpoint)
        logger.warning(
            "%s; the workers are restarted%s, and the run continues from %s; results do not depend on it%s",
            *(cause, how, config.trainer.checkpoint or "its start", advice),
        )


def continued(config: C, run_dir: Path, checkpoint: Path | None) -> C:
    """The settings of a run that continues in its directory, from this checkpoint or from where it started."""
    settings = config.trainer
    if settings.validate_only:
        return config  # it measures the same checkpoint again
    start = checkpoint or settings.checkpoint or "auto"
    update = {"output_dir": run_dir.parent, "run_id": run_dir.name, "resume": start}
    return config.model_copy(update={"trainer": settings.model_copy(update=update)})


def with_limits(config: W, lowered: Sequence[LoweredLimit]) -> W:
    """The settings with limits that were lowered earlier in the run. A limit that was changed since stays."""
    for limit in lowered:
        section, _, name = limit.setting.partition(".")
        settings = getattr(config, section)
        if getattr(settings, name) == limit.before:
            logger.info("%s, with which a GPU's memory was full earlier in this run", limit)
            config = config.model_copy(update={section: settings.model_copy(update={name: limit.after})})
    return config


def all_lowered(resumed: TrainingState | None, lowered: Sequence[LoweredLimit]) -> list[LoweredLimit]:
    """The limits that were lowered before a checkpoint and then those after it."""
    before = resumed.lowered if resumed else ()
    return [*before, *(limit for limit in lowered if limit not in before)]
