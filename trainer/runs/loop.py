"""The loop of every training run: its steps, what follows each of them, and how it goes on after a failure."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from trainer.cluster.calls import recorded, stalls_explained
from trainer.cluster.garbage import collect_garbage
from trainer.cluster.ready import wait_for_ray
from trainer.config.tree import RunConfig
from trainer.errors import LoweredLimit, WorkerError
from trainer.records.files.owner import RunOwner
from trainer.runs.checkpoints.places import run_directory
from trainer.runs.efficiency import Traces
from trainer.runs.ending import Ending
from trainer.runs.recovery.memory import restarted
from trainer.runs.recovery.redundancy import Recovery
from trainer.runs.reproduction.writer import Repeat
from trainer.runs.session import RunKind, Session, started
from trainer.runs.step import Metrics, Progress, Step

logger = logging.getLogger(__name__)

# torch threads in the controller, whose tensors are small: dividing 2,048 rows among four ranks took 342 ms with the 64
# threads of a large host, 6 ms with 8.
THREADS = 8


def run(given: RunConfig, prepare: Callable[[], RunKind[Step]], repeat: Repeat | None = None) -> Path:
    """Takes all steps of a run on the Ray cluster at RAY_ADDRESS, or on this machine; the run's directory.

    `given` are the user's own settings. `prepare` reads models and data, before any process starts: an error in a file
    costs seconds. `repeat` is what a replay repeats. Raises a TrainerError for every problem that the user can fix,
    InterruptedRun after SIGTERM.
    """
    given.trainer.check_resume()
    run_dir = run_directory(given.trainer)
    kind = prepare()
    wait_for_ray()  # so far nothing is written: if Ray never is up, nothing is left

    def attempt(given: RunConfig, lowered: Sequence[LoweredLimit], again: bool) -> Path:
        with (
            started(kind, run_dir, owner.check, repeat, given, lowered, again) as session,
            kind.open(session) as steps,
        ):
            Loop(session, steps).run()
            return run_dir

    with RunOwner(run_dir) as owner, stalls_explained(given.trainer, run_dir):
        return restarted(given, run_dir, attempt)


class Loop:
    """Takes the steps of a run after the one that it continues from, and ends it."""

    def __init__(self, session: Session, steps: Step) -> None:
        """Loads the checkpoint to continue from, if there is one, and prepares the first step."""
        self._session, self._steps, self._settings = session, steps, session.config.trainer
        with session.tracker.phase("start_up"):
            self._progress = Progress(session, steps)
            self._continue()
            session.tracker.begin()
            session.certificate.begin()
            recovery = Recovery(session, steps, self._progress) if self._settings.redundancy else None
        traces = Traces(self._settings, session.run_dir, session.workers.training.all, session.tracker)
        self._recovery, self._traces, self._ending = recovery, traces, Ending(session, self._progress)
        # What follows each step; each gets its number and its metrics so far, to which it may add.
        copy = [recovery.copy] if recovery else []
        self._observers: list[Callable[[int, Metrics], None]] = [
            *(self._look_at_checkpoint, self._progress.collect_lowered, self._progress.finish, self._validate),
            *copy,
            *(self._record, self._save),
        ]

    def run(self) -> None:
        """All steps, with validation and checkpoints between them."""
        session, progress = self._session, self._progress
        session.stop.defer()
        collect_garbage()  # now, and not while ranks wait for this process
        torch.set_num_threads(min(torch.get_num_threads(), THREADS))
        if self._settings.validate_only:
            session.tracker.log(progress.step, self._steps.validate(progress.step))
            return
        with self._ending.saving(), recorded(session.efficiency.timeline):
            if progress.step == 0 and self._settings.test_before_training:
                session.tracker.log(0, progress.validate())
            while progress.step < session.last_step and not self._good_enough():
                try:
                    self._take(progress.step + 1)
                except WorkerError as error:
                    if self._recovery is None:
                        raise
                    self._recovery.recover(error)
                session.stop.check()

    def _take(self, number: int) -> None:
        metrics: Metrics = {}
        with self._traces.traced(number), self._session.efficiency.measured(metrics):
            metrics |= self._steps.take(number, self._progress)
        for observe in self._observers:
            observe(number, metrics)

    def _look_at_checkpoint(self, _step: int, metrics: Metrics) -> None:
        metrics |= self._session.saver.look()

    def _validate(self, step: int, metrics: Metrics) -> None:
        freq = self._settings.test_freq
        if step == self._session.last_step or (freq > 0 and step % freq == 0):
            metrics |= self._progress.validate()

    def _record(self, step: int, metrics: Metrics) -> None:
        self._session.tracker.log_waits(step, self._session.efficiency.waiting)
        self._session.tracker.log(step, metrics)
        self._progress.logged()

    def _save(self, step: int, _metrics: Metrics) -> None:
        session = self._session
        if step < session.last_step and session.saver.schedule.due(step):
            with session.tracker.phase("save"):
                session.saver.begin(self._progress.state)

    def _good_enough(self) -> bool:
        stop_at, exact_match = self._settings.stop_at, self._progress.state.exact_match
        return stop_at is not None and exact_match is not None and exact_match >= stop_at

    def _continue(self) -> None:
        session, checkpoint = self._session, self._settings.checkpoint
        if session.resumed is not None and checkpoint is not None:
            session.load_weights(checkpoint)
            session.saver.resume(checkpoint, session.resumed.step)
            if self._progress.step >= session.last_step:
                logger.warning(
                    "%s is of step %d and the run has %d: nothing is left to do; raise trainer.total_steps or "
                    "total_epochs",
                    *(checkpoint, self._progress.step, session.last_step),
                )
        self._steps.begin(session.resumed)
