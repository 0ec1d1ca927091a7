"""Checkpoints beside training: workers copy their state and write the copy; later steps poll for completion."""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from trainer.cluster.calls import wait
from trainer.cluster.workers import WorkerGroup
from trainer.errors import CheckpointError, TrainerError
from trainer.runs.checkpoint import CheckpointWriter, TrainingState
from trainer.runs.interfaces import TrainedRole

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 30.0  # for a save that is still running when the run fails


class Saver:
    """Saves the trained roles of a run. `last` is the last complete checkpoint, `step` its step."""

    def __init__(self, groups: Sequence[WorkerGroup[TrainedRole]], run_dir: Path, keep: int | None) -> None:
        self._groups = groups
        self._writer = CheckpointWriter(run_dir, keep)
        self._under_way: TrainingState | None = None
        self.last: Path | None = None
        self.step = 0

    def start(self, state: TrainingState) -> None:
        """Starts a checkpoint; returns as soon as every worker has copied its state.

        The previous checkpoint must be finished. Raises CheckpointError if the directory cannot be made.
        """
        partial = self._writer.begin(state)
        calls = [call for group in self._groups for call in group.start(TrainedRole.start_save, partial / group.role)]
        wait(calls, self._timeout)
        self._under_way = state

    def look(self) -> None:
        """Completes the running checkpoint if all workers have written. Raises CheckpointError if one could not."""
        if self._under_way is not None and not any(any(group.call(TrainedRole.saving)) for group in self._groups):
            self.finish()

    def finish(self) -> None:
        """Waits for the running checkpoint and completes it.

        Raises CheckpointError if it cannot be written; earlier checkpoints are kept.
        """
        self._finish(self._timeout)

    def attempt(self, save: Callable[[], None]) -> dict[str, float]:
        """Metrics of a save. A failure only skips this checkpoint: the next one may find space again."""
        try:
            save()
        except CheckpointError as error:
            logger.warning("no checkpoint: %s; %s; the last one is %s", error, error.hint, self.last)
            return {"checkpoint/failed": 1.0}
        return {}

    def close(self) -> None:
        """Completes the running checkpoint if it ends soon, else removes it."""
        with suppress(TrainerError):  # the run already ends with another error
            self._finish(CLOSE_SECONDS)
        self._writer.abandon()

    @property
    def _timeout(self) -> float:
        return self._groups[0].timeout

    def _finish(self, seconds: float) -> None:
        if self._under_way is None:
            return
        state, self._under_way = self._under_way, None
        try:
            calls = [(group, call) for group in self._groups for call in group.start(TrainedRole.finish_save)]
            found = wait([call for _, call in calls], seconds)
            owned = zip((group.role for group, _ in calls), found, strict=True)
            sums = {f"{role}/{name}": own for role, files in owned for name, own in files.items()}
            self.last = self._writer.complete(sums)
        except CheckpointError:
            self._writer.abandon()
            raise
        self.step = state.step
        logger.info("saved %s", self.last)
