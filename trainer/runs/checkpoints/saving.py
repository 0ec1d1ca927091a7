"""Checkpoints beside training: workers copy their state and write the copy; later steps poll for completion."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from trainer.background import ended_within
from trainer.cluster.calls import wait
from trainer.cluster.workers import WorkerGroup
from trainer.config.sections.trainer import TrainerConfig
from trainer.errors import CheckpointError, TrainerError
from trainer.runs.checkpoints.checkpoint import CheckpointWriter, checkpoint_step, last_checkpoint
from trainer.runs.checkpoints.manifest import Inputs, TrainingState
from trainer.runs.interfaces import TrainedRole

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 30.0  # for a save that is still running when the run fails
HEALTH_SECONDS = 30.0  # in which every rank of a healthy learner answers between two steps
POLL_SECONDS = 5.0  # between two looks at how much of a checkpoint is written
RETRY_SECONDS = 60.0  # after a save that failed
ROUNDS = 3  # attempts to write the last checkpoint and the final model


class SaveSchedule:
    """When a run saves: by steps, by time, or only at the end; a minute later again if a save failed."""

    def __init__(self, settings: TrainerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._freq, self._clock = settings.save_freq, clock
        self._interval = 60.0 * settings.minutes_between_saves
        self._next = clock() + self._interval
        self._retry: float | None = None

    def due(self, step: int) -> bool:
        """Whether a checkpoint of this step is to be written."""
        now = self._clock()
        by_step = self._freq > 0 and step % self._freq == 0
        by_time = self._interval > 0 and now >= self._next
        return by_step or by_time or (self._retry is not None and now >= self._retry)

    def started(self) -> None:
        """A save has started: the next one is due an interval from now."""
        self._next, self._retry = self._clock() + self._interval, None

    def retry(self, seconds: float = RETRY_SECONDS) -> None:
        """A save is due again after this many seconds, whatever the step."""
        if self._freq != 0:
            self._retry = self._clock() + seconds


class Saver:
    """Saves the trained roles of a run. `last` is the last complete checkpoint, `step` its step.

    Checkpoints go to the first of `run_dirs`, and to the next one after a failure there. `written` gets step and path
    of each that is complete. `flush_records` waits until the records of its steps are written: no checkpoint may stand
    without them. `inputs` are the files that the run started from.
    """

    def __init__(
        self,
        groups: Sequence[WorkerGroup[TrainedRole]],
        run_dirs: Sequence[Path],
        keep: int | None,
        schedule: SaveSchedule,
        pause: Callable[[float], object] | None = None,
        written: Callable[[int, Path], object] | None = None,
        flush_records: Callable[[], object] | None = None,
        inputs: Callable[[], Inputs] = dict,
    ) -> None:
        self._groups = groups
        self._flush_records = flush_records
        self._write_beside: Callable[[Path, int], Mapping[str, str]] | None = None
        self._beside: Mapping[str, str] = {}
        self._writers = [CheckpointWriter(run_dir, keep, inputs) for run_dir in run_dirs]
        self._place = 0
        self.pause = pause or threading.Event().wait
        self._written = written
        self._under_way: TrainingState | None = None
        self._metrics: dict[str, float] = {}
        self.schedule = schedule
        self.last: Path | None = None
        self.step = 0
        self._resumed_step = 0
        self._own: set[Path] = set()

    def resume(self, checkpoint: Path, step: int) -> None:
        """Counts a checkpoint, from which the run continues, as the last one."""
        self.last, self.step, self._resumed_step = checkpoint, step, step

    def write_beside(self, write: Callable[[Path, int], Mapping[str, str]]) -> None:
        """Has `write` add to each checkpoint what is not in the workers. It gets directory and step, and returns the
        SHA-256 of each file. Raises CheckpointError."""
        self._write_beside = write

    def begin(self, state: TrainingState) -> None:
        """Starts a checkpoint; returns as soon as every worker has copied its state.

        A failure is reported and counted, and the next steps try again. If the previous checkpoint is still being
        written, this one waits.
        """
        try:
            if self._under_way is not None and self._finish(0.0):
                self._count("checkpoint/postponed")
                logger.warning(
                    "the checkpoint of step %d is still being written, so that of step %d waits; "
                    "a faster disk or fewer checkpoints would avoid that",
                    self._under_way.step,
                    state.step,
                )
                self.schedule.retry(POLL_SECONDS)
                return
            self._start(state)
        except CheckpointError as error:
            self._failed(error)

    def look(self) -> dict[str, float]:
        """Completes the running checkpoint if all workers have written; metrics of the saves since the last call."""
        try:
            self._finish(0.0)
        except CheckpointError as error:
            self._failed(error)
        metrics, self._metrics = self._metrics, {}
        return metrics

    def settle(self) -> None:
        """Waits for the running checkpoint. A failure is reported and counted."""
        try:
            self._wait_while_it_grows()
        except CheckpointError as error:
            self._failed(error)

    def save(self, state: TrainingState, rounds: int = ROUNDS) -> None:
        """Writes the checkpoint of this state, unless it exists, before it returns. Tries every directory of the run
        `rounds` times, with a pause between the rounds.

        Raises CheckpointError if it cannot be written; earlier checkpoints are kept.
        """
        self.settle()
        attempts = rounds * len(self._writers)
        while self.last is None or self.step < state.step or not self.last.exists():
            attempts -= 1
            try:
                self._start(state)
                self._wait_while_it_grows()
            except CheckpointError as error:
                self._failed(error)
                if not attempts:
                    raise
                if attempts % len(self._writers) == 0:
                    self.pause(RETRY_SECONDS)

    def healthy(self) -> bool:
        """Whether every rank answers, so that its state can be saved."""
        try:
            wait([call for group in self._groups for call in group.start(TrainedRole.saving)], HEALTH_SECONDS)
        except TrainerError as error:
            logger.warning("no checkpoint of the last step: %s", error)
            return False
        return True

    def before(self, step: int) -> Path | None:
        """The newest whole checkpoint of a step below `step`; None if there is none.

        Those that the run once wrote beyond the step at which it continued do not count: it takes these steps anew.
        """
        run_dirs = [writer.run_dir for writer in self._writers]
        with suppress(CheckpointError):
            return last_checkpoint(*run_dirs, below=step, counts=self._in_history)
        return None

    def _in_history(self, checkpoint: Path) -> bool:
        return checkpoint in self._own or checkpoint_step(checkpoint) <= self._resumed_step

    def keep_for_roll_backs(self, lag: int) -> None:
        """Keeps checkpoints that are `lag` steps older than the newest, and older ones; see CheckpointWriter."""
        for writer in self._writers:
            writer.lag = lag

    def close(self) -> None:
        """Completes the running checkpoint if it ends soon, else removes it."""
        with suppress(TrainerError):  # the run already ends with another error
            self._finish(CLOSE_SECONDS)
        ended_within(CLOSE_SECONDS, self.abandon, "removal of the checkpoint that was not complete")

    def abandon(self) -> None:
        """Removes the running checkpoint: its ranks will not answer."""
        self._under_way = None
        for writer in self._writers:
            writer.abandon()

    @property
    def _writer(self) -> CheckpointWriter:
        return self._writers[self._place]

    def _start(self, state: TrainingState) -> None:
        """Raises CheckpointError if the directory or the copies cannot be made."""
        self.schedule.started()
        if self._writing():
            raise CheckpointError(
                "a rank is still writing a checkpoint that was given up", hint="check the disk of the run's directory"
            )
        partial = self._writer.begin(state)
        try:
            copying = [group.start(TrainedRole.start_save, partial / group.role) for group in self._groups]
            self._beside = self._write_beside(partial, state.step) if self._write_beside else {}
            wait([call for calls in copying for call in calls], self._timeout)
        except CheckpointError:
            self._writer.abandon()
            raise
        self._under_way = state

    def _writing(self) -> bool:
        return any(any(group.call(TrainedRole.saving)) for group in self._groups)

    @property
    def _timeout(self) -> float:
        return self._groups[0].timeout

    def _wait_while_it_grows(self) -> None:
        """Waits for the running checkpoint as long as bytes are written.

        Raises CheckpointError if it cannot be written, or if nothing was written for the time limit of a call.
        """
        written, looks = 0, 0
        while self._under_way is not None and self._finish(POLL_SECONDS):
            looks += 1
            size = self._writer.written_bytes()
            if size > written:
                written, looks = size, 0
            elif looks * POLL_SECONDS >= self._timeout:
                step, self._under_way = self._under_way.step, None
                raise CheckpointError(
                    f"the checkpoint of step {step} stopped growing at {written} bytes for {self._timeout:g} s",
                    hint="check the disk of the run's directory",
                )

    def _finish(self, seconds: float) -> bool:
        """Completes the running checkpoint if all ranks have written it within `seconds`; whether some still write.

        Raises CheckpointError if it cannot be written.
        """
        if self._under_way is None:
            return False
        limit = self._timeout + seconds
        try:
            calls = [(group, call) for group in self._groups for call in group.start(TrainedRole.finish_save, seconds)]
            written = list(
                zip((group.role for group, _ in calls), wait([call for _, call in calls], limit), strict=True)
            )
            if any(files is None for _, files in written):
                return True
            state, self._under_way = self._under_way, None
            sums = {f"{role}/{name}": checksum for role, files in written for name, checksum in (files or {}).items()}
            if self._flush_records is not None:
                self._flush_records()
            self.last = self._writer.complete(sums | dict(self._beside))
        except CheckpointError:
            self._under_way = None
            self._writer.abandon()
            raise
        self.step = state.step
        self._own.add(self.last)
        if self._written is not None:
            self._written(self.step, self.last)
        logger.info("saved %s", self.last)
        return False

    def _failed(self, error: CheckpointError) -> None:
        """Reports and counts a failure; the next attempt takes the next directory."""
        self._count("checkpoint/failed")
        self._place = (self._place + 1) % len(self._writers)
        self.schedule.retry()
        logger.warning("no checkpoint: %s; %s; the last one is %s", error, error.hint, self.last)

    def _count(self, name: str) -> None:
        self._metrics[name] = self._metrics.get(name, 0.0) + 1.0
