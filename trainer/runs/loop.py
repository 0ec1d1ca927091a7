"""The loop of every training run: its steps, what follows each of them, and how the run goes on after a failure."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from trainer.cluster.calls import recorded
from trainer.cluster.garbage import collect_garbage
from trainer.config.sections.trainer import TrainerConfig
from trainer.errors import WorkerError
from trainer.records.tracking import Tracker
from trainer.runs.checkpoints.manifest import TrainingState
from trainer.runs.efficiency import Efficiency
from trainer.runs.ending import Ending
from trainer.runs.progress import Progress
from trainer.runs.stop_signal import StopSignal

# torch threads in the controller, whose tensors are small: dividing 2,048 rows among four ranks took 342 ms with the 64
# threads of a large host, 6 ms with 8.
THREADS = 8

Metrics = dict[str, float]
Observer = Callable[[int, Metrics], None]
"""Called after each step with its number and its metrics so far, to which it may add."""


class Step(Protocol):
    """The steps of one kind of run, and the state of the controller between them."""

    def take(self, number: int, progress: Progress) -> Metrics:
        """Takes a step; its metrics. Weights change inside `progress.updating` alone."""
        ...

    def validate(self, number: int) -> Metrics:
        """Measures the model after a step; the metrics."""
        ...

    def begin(self, resumed: TrainingState | None) -> None:
        """Prepares the first step, once the trained roles have their weights; `resumed` is the state to continue."""
        ...

    def state(self) -> Mapping[str, Any]:
        """Fields of TrainingState after the last step: the sampler's, and what else a resumed run needs."""
        ...

    def snapshot(self) -> Callable[[], None]:
        """A function that returns to the present state, so that the next step can be taken again."""
        ...


class Recovers(Protocol):
    def recover(self, error: WorkerError) -> None:
        """Returns to the last finished step. Raises TrainerError if that is impossible."""
        ...


class Loop:
    """Takes the steps after `progress` up to the last one, and ends the run.

    `observers` are called after each step, in their order. `traced` is entered around each step. Without `recovery`, a
    failed worker ends the run.
    """

    def __init__(
        self,
        settings: TrainerConfig,
        step: Step,
        last_step: int,
        progress: Progress,
        *,
        tracker: Tracker,
        stop: StopSignal,
        efficiency: Efficiency,
        traced: Callable[[int], AbstractContextManager[None]],
        observers: Sequence[Observer],
        recovery: Recovers | None,
        ending: Ending,
    ) -> None:
        self._settings, self._step, self._last_step, self._progress = settings, step, last_step, progress
        self._tracker, self._stop, self._efficiency, self._traced = tracker, stop, efficiency, traced
        self._observers, self._recovery, self._ending = observers, recovery, ending

    def run(self) -> None:
        """All steps, with validation and checkpoints between them."""
        self._stop.defer()
        collect_garbage()  # now, and not while ranks wait for this process
        torch.set_num_threads(min(torch.get_num_threads(), THREADS))
        if self._settings.validate_only:
            self._tracker.log(self._progress.step, self._step.validate(self._progress.step))
            return
        with self._ending.saving(), recorded(self._efficiency.timeline):
            if self._progress.step == 0 and self._settings.test_before_training:
                self._tracker.log(0, self._progress.validate(self._step.validate))
            while self._progress.step < self._last_step and not self._good_enough():
                try:
                    self._take(self._progress.step + 1)
                except WorkerError as error:
                    if self._recovery is None:
                        raise
                    self._recovery.recover(error)
                self._stop.check()

    def _take(self, number: int) -> None:
        metrics: Metrics = {}
        with self._traced(number), self._efficiency.measured(metrics):
            metrics |= self._step.take(number, self._progress)
        for observe in self._observers:
            observe(number, metrics)

    def _good_enough(self) -> bool:
        stop_at, exact_match = self._settings.stop_at, self._progress.state.exact_match
        return stop_at is not None and exact_match is not None and exact_match >= stop_at
