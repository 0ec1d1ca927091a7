"""How far a run is: the state after its last finished step, and whether the workers hold the weights of that step."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.errors import WatchdogError
from trainer.runs.checkpoints.manifest import TrainingState
from trainer.runs.stop_signal import StopSignal
from trainer.training.non_finite import FOLDER, KeptFaults

logger = logging.getLogger(__name__)


class Progress:
    """`state` is that after the last finished step. While not `settled`, weights and optimizers are those of no step.
    `unlogged` are the metrics of the last step until `logged`.
    """

    def __init__(self, state_after: Callable[[int], TrainingState], stop: StopSignal, run_dir: Path) -> None:
        """`state_after` gives the state after a step that has just ended."""
        self._state_after, self._stop = state_after, stop
        self._faults = KeptFaults(run_dir / FOLDER)
        self.state = state_after(0)
        self.settled = True
        self.unlogged: dict[str, float] | None = None

    @property
    def step(self) -> int:
        """The last finished step."""
        return self.state.step

    @contextmanager
    def updating(self, step: int, metrics: dict[str, float]) -> Iterator[None]:
        """Weights may change inside; afterwards the step can be saved. Raises InterruptedRun if the run is to stop."""
        self._stop.check()
        self.settled = False
        try:
            yield
        except WatchdogError:
            self.settled = True  # it is raised before anything changes
            raise
        self.finish(step, metrics)
        for path, cause in self._faults.new():
            logger.warning("step %d: an optimizer step was left out: %s; see %s", step, cause, path)

    def finish(self, step: int, metrics: dict[str, float]) -> None:
        """The step is the last finished one, with these metrics to log."""
        self.state, self.settled, self.unlogged = self._state_after(step), True, metrics

    def validate(self, measure: Callable[[int], dict[str, float]]) -> dict[str, float]:
        """The metrics of a validation after the last step, which belongs to its state."""
        metrics = measure(self.step)
        self.state = self._state_after(self.step)
        return metrics

    def logged(self) -> None:
        self.unlogged = None

    def lose(self) -> None:
        """Some ranks may have the weights that the run started with."""
        self.settled = False

    def return_to(self, state: TrainingState) -> None:
        """The workers hold the weights of this state."""
        self.state, self.settled, self.unlogged = state, True, None
