"""The steps of a run, and how far it is: the last finished step, and whether the workers hold its weights."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from trainer.cluster.calls import wait
from trainer.errors import LoweredLimit, WatchdogError
from trainer.runs.checkpoints.manifest import TrainingState
from trainer.runs.interfaces import TrainingRole
from trainer.runs.session import Session
from trainer.training.non_finite import FOLDER, KeptFaults

logger = logging.getLogger(__name__)

Metrics = dict[str, float]


class Step(Protocol):
    """The steps of one kind of run, and the state of the controller between them."""

    def take(self, number: int, progress: "Progress") -> Metrics:
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


class Progress:
    """`state` is that after the last finished step. While not `settled`, weights and optimizers are those of no step.
    `unlogged` are the metrics of the last step until `logged`.
    """

    def __init__(self, session: Session, steps: Step) -> None:
        self._session, self._steps = session, steps
        self._settings = session.config.model_dump(mode="json")
        self._faults = KeptFaults(session.run_dir / FOLDER)
        self._lowered, self._unlogged_limits = tuple(session.lowered), 0
        self.state = session.resumed or self._state_after(0)
        self.settled = True
        self.unlogged: Metrics | None = None
        # This process has lowered limits since the checkpoint.
        for limit in session.lowered[len(session.resumed.lowered if session.resumed else ()) :]:
            self._certify(limit, self.step + 1)

    @property
    def step(self) -> int:
        """The last finished step."""
        return self.state.step

    @contextmanager
    def updating(self, step: int, metrics: Metrics) -> Iterator[None]:
        """Weights may change inside; afterwards the step can be saved. Raises InterruptedRun if the run is to stop."""
        self._session.stop.check()
        self.settled = False
        try:
            yield
        except WatchdogError:
            self.settled = True  # it is raised before anything changes
            raise
        self.finish(step, metrics)
        for path, cause in self._faults.new():
            logger.warning("step %d: an optimizer step was left out: %s; see %s", step, cause, path)

    def finish(self, step: int, metrics: Metrics) -> None:
        """The step is the last finished one, with these metrics to log."""
        self.state, self.settled, self.unlogged = self._state_after(step), True, metrics

    def validate(self) -> Metrics:
        """The metrics of a validation after the last step, which belongs to its state."""
        metrics = self._steps.validate(self.step)
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

    def lower(self, limit: LoweredLimit, step: int) -> None:
        """Records a limit that was lowered in a step."""
        self._lowered = (*self._lowered, limit)
        self._certify(limit, step)

    def collect_lowered(self, step: int, metrics: Metrics) -> None:
        """Reports and records the limits that ranks have lowered by themselves during a step."""
        session = self._session
        calls = [call for group in session.workers.training.all for call in group.start(TrainingRole.take_lowered)]
        for limit in (limit for limits in wait(calls, session.config.trainer.worker_timeout) for limit in limits):
            logger.warning(
                "step %d: the GPU's memory was full, so a pass was taken again with %s, which stays; results do not "
                "depend on it; to avoid the repetition, set %s=%d",
                *(step, limit, limit.setting, limit.after),
            )
            self.lower(limit, step)
        if self._unlogged_limits:
            metrics["memory/lowered_limits"] = float(self._unlogged_limits)
            self._unlogged_limits = 0

    def _certify(self, limit: LoweredLimit, step: int) -> None:
        self._unlogged_limits += 1
        self._session.certificate.lowered(step, limit)

    def _state_after(self, step: int) -> TrainingState:
        fields, seed = self._steps.state(), self._session.config.trainer.seed
        state = TrainingState(step=step, seed=seed, sampler=fields["sampler"], config=self._settings)
        return state.model_copy(update={**fields, "lowered": self._lowered})
