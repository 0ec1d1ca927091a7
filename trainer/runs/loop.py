"""The loop of every training run: steps, checkpoints, and the end."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from trainer.background import in_background
from trainer.cluster.calls import recorded, wait
from trainer.cluster.garbage import collect_garbage
from trainer.cluster.workers import WorkerGroup
from trainer.config.tree import Config
from trainer.data.batches.batch import Batch
from trainer.data.dataset import PromptSampler
from trainer.errors import (
    CheckpointError,
    InterruptedRun,
    LostRankError,
    LostRunError,
    LoweredLimit,
    MemoryFullError,
    RestartError,
    TrainerError,
    WorkerError,
)
from trainer.records.pages.model_card import write_model_card
from trainer.records.profiling import SlowPhases
from trainer.records.tracking import INTERRUPTED, Tracker
from trainer.rollout.engines import EngineWorker
from trainer.runs.checkpoints.checkpoint import hashed_inputs, starting_files
from trainer.runs.checkpoints.final_model import write_final_model
from trainer.runs.checkpoints.manifest import TrainingState
from trainer.runs.checkpoints.places import run_directories
from trainer.runs.checkpoints.saving import ROUNDS, Saver, SaveSchedule
from trainer.runs.efficiency import Efficiency
from trainer.runs.interfaces import TrainedRole, TrainingRole
from trainer.runs.passes import forward, update
from trainer.runs.recovery.memory import all_lowered
from trainer.runs.recovery.redundancy import Connect, Copies
from trainer.runs.reproduction.writer import CertificateWriter
from trainer.runs.stop_signal import StopSignal
from trainer.runs.workers import TrainingGroups
from trainer.training.non_finite import FOLDER, KeptFaults

logger = logging.getLogger(__name__)

W = TypeVar("W")

# torch threads in the controller, whose tensors are small: dividing 2,048 rows among four ranks took 342 ms with the 64
# threads of a large host, 6 ms with 8.
THREADS = 8


@dataclass(frozen=True)
class TrainingResult:
    """The result of a run, with the first and last exact match that it measured."""

    run_dir: Path
    final_step: int
    first_exact_match: float | None
    last_exact_match: float | None


class TrainingRun:
    """The loop over the steps of a run, its checkpoints and its end. Each kind of run adds `step` and `validate`."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        tracker: Tracker,
        stop: StopSignal,
        groups: TrainingGroups,
        certificate: CertificateWriter,
        sampler: PromptSampler,
        last_step: int,
        engines: WorkerGroup[EngineWorker] | None = None,
    ) -> None:
        self._settings = config.trainer
        self._dump = config.model_dump(mode="json")
        self._model = config.model.directory
        # Beside the run: a large model takes minutes.
        inputs = in_background(partial(hashed_inputs, starting_files(config)), "hashes of the models and the data")
        self._groups = groups
        self._sampler = sampler
        self.run_dir = run_dir
        self.tracker = tracker
        self._slow_phases = SlowPhases(config.trainer.profiler)
        self.efficiency = Efficiency(config, groups.all, engines)
        self.stop = stop
        self.certificate = certificate
        self.last_step = certificate.last_step(last_step)
        self.saver = Saver(
            groups.trained,
            run_directories(config.trainer, run_dir),
            config.trainer.keep_checkpoints,
            SaveSchedule(config.trainer),
            written=certificate.checkpoint,
            write_beside=self.write_beside,
            flush_records=tracker.flush,
            inputs=inputs.result,
        )
        self._lowered: tuple[LoweredLimit, ...] = ()
        self._unlogged_limits = 0
        self.progress = self.state(0)
        # Whether weights and optimizers are those after `progress`, and the metrics of that step until they are logged.
        self._settled = True
        self._unlogged: dict[str, float] | None = None
        self._faults = KeptFaults(run_dir / FOLDER)
        self._copies: Copies | None = None
        self._recoveries = 0  # since the last step that is recorded

    def step(self, step: int) -> dict[str, float]:
        """Takes a step; its metrics. Calls `begin_update` before anything changes and `end_update` after it did."""
        raise NotImplementedError

    def forward_pass(
        self, phase: str, group: WorkerGroup[W], method: Callable[[W, Batch], Tensor], batch: Batch
    ) -> Tensor:
        """A phase that is a forward pass; see `forward`."""
        with self.tracker.phase(phase), self.efficiency.computing(phase, group.role, batch):
            return forward(group, method, batch)

    def update_pass(
        self, phase: str, group: WorkerGroup[TrainedRole], batch: Batch, mini_batch_size: int
    ) -> dict[str, float]:
        """A phase that takes a role's optimizer steps; see `update`."""
        with self.tracker.phase(phase), self.efficiency.computing(phase, group.role, batch, mini_batch_size):
            return update(group, batch, mini_batch_size)

    def validate(self) -> dict[str, float]:
        """Measures the model; the metrics."""
        raise NotImplementedError

    def write_beside(self, directory: Path) -> dict[str, str]:  # noqa: ARG002
        """Writes what a checkpoint of the last finished step holds besides the roles; the SHA-256 of each file.

        Raises CheckpointError.
        """
        return {}

    def good_enough(self) -> bool:
        """Whether the run may end early."""
        return False

    def begin(self, resumed: TrainingState | None, lowered: Sequence[LoweredLimit] = ()) -> None:
        """Continues from a checkpoint if there is one. `lowered` are limits that this process has lowered so far."""
        if resumed is not None:
            self.progress, self._lowered = resumed, resumed.lowered
        for limit in all_lowered(resumed, lowered)[len(self._lowered) :]:
            self.note(limit, self.progress.step + 1)
        checkpoint = self._settings.checkpoint
        if resumed is None or checkpoint is None:
            return
        self._sampler.load_state_dict(resumed.sampler)
        self.load_weights(checkpoint)
        self.saver.resume(checkpoint, resumed.step)
        if resumed.step >= self.last_step:
            logger.warning(
                "%s is of step %d and the run has %d: nothing is left to do; raise trainer.total_steps or total_epochs",
                *(checkpoint, resumed.step, self.last_step),
            )

    def keep_copies(self, connect: Connect) -> None:
        """Keeps copies of the trained roles from now on, if `trainer.redundancy` says so. `connect` connects the ranks
        of groups that are started again."""
        if self._settings.redundancy:
            self._copies = Copies(self._groups, connect, self.progress)
            self.remember()

    def remember(self) -> None:
        """Remembers what `return_to` needs besides the run's state."""

    def return_to(self, state: TrainingState) -> None:
        """Prepares the controller to take the step after `state` again; the workers are prepared already."""
        self._sampler.load_state_dict(state.sampler)

    def _recover(self, error: WorkerError) -> None:
        """Returns to the step of the copies after a failure. Raises `error` if there are none, else as they do."""
        if self._copies is None:
            raise error
        with self.tracker.phase("recovery"):
            try:
                self.progress = self._copies.restore(error, self.saver.abandon)
            except LostRankError:
                self._settled = False  # some ranks may have the weights that the run started with
                raise
            self._settled, self._unlogged = True, None
            self.return_to(self.progress)
        if isinstance(error, MemoryFullError) and error.lowered is not None:
            self.note(error.lowered, self.progress.step + 1)
        self._recoveries += 1

    def note(self, limit: LoweredLimit, step: int) -> None:
        """Records a limit that was lowered in a step."""
        self._lowered = (*self._lowered, limit)
        self._unlogged_limits += 1
        self.certificate.lowered(step, limit)

    def _note_retries(self, step: int) -> None:
        """Reports and records the limits that ranks have lowered by themselves during a step."""
        calls = [call for group in self._groups.all for call in group.start(TrainingRole.take_lowered)]
        for limit in (limit for lowered in wait(calls, self._settings.worker_timeout) for limit in lowered):
            logger.warning(
                "step %d: the GPU's memory was full, so a pass was taken again with %s, which stays; results do not "
                "depend on it; to avoid the repetition, set %s=%d",
                *(step, limit, limit.setting, limit.after),
            )
            self.note(limit, step)

    def load_weights(self, checkpoint: Path) -> None:
        """Gives every trained group the weights and the optimizer of a checkpoint."""
        for group in self._groups.trained:
            group.call(TrainedRole.load, checkpoint / group.role)

    def run(self) -> None:
        """All steps, with validation and checkpoints between them."""
        settings = self._settings
        self.stop.defer()
        collect_garbage()  # now, and not while ranks wait for this process
        torch.set_num_threads(min(torch.get_num_threads(), THREADS))
        if settings.validate_only:
            self.tracker.log(self.progress.step, self.validate())
            return
        try:
            with recorded(self.efficiency.timeline):
                self._take_steps()
        except LostRunError:
            raise  # the directory is no longer this run's
        except InterruptedRun as error:
            self.save_last()
            raise InterruptedRun(error.number, f" after step {self.progress.step}", self._how_to_continue()) from error
        except TrainerError as error:
            self._save_before_ending()
            error.hint = "; then ".join(filter(None, [error.hint, self._how_to_continue()]))
            if isinstance(error, RestartError):
                error.checkpoint = self.saver.last
                if not self._settled or not self.saver.healthy():
                    self.saver.abandon()  # ranks wait for the one that failed
            raise
        except BaseException:
            self._save_before_ending()
            raise
        else:
            self._end()
        finally:
            self.saver.close()

    def _take_steps(self) -> None:
        settings = self._settings
        if self.progress.step == 0 and settings.test_before_training:
            self.tracker.log(0, self.validate())
        while self.progress.step < self.last_step and not self.good_enough():
            try:
                self._take_step(self.progress.step + 1)
            except WorkerError as error:
                self._recover(error)
            self.stop.check()

    def _take_step(self, step: int) -> None:
        """Takes, measures, records and saves a step."""
        settings = self._settings
        self.efficiency.begin()
        with self._traced(step):
            metrics = self.step(step)
            use = self.efficiency.measure()
        metrics |= use.metrics
        metrics |= self.saver.look()
        self._note_retries(step)
        if self._unlogged_limits:
            metrics["memory/lowered_limits"] = float(self._unlogged_limits)
            self._unlogged_limits = 0
        self.end_update(step, metrics)
        if step == self.last_step or (settings.test_freq > 0 and step % settings.test_freq == 0):
            metrics |= self.validate()
        if self._copies is not None:
            with self.tracker.phase("copy"):
                self._copies.take(self.progress)
            self.remember()
            metrics["trainer/recoveries"] = float(self._recoveries)
            self._recoveries = 0
        self.tracker.log_waits(step, use.waiting)
        self.tracker.log(step, metrics)
        self._unlogged = None
        if step < self.last_step and self.saver.schedule.due(step):
            with self.tracker.phase("save"):
                self.saver.begin(self.progress)

    def begin_update(self) -> None:
        """Call it before a step changes weights: until `end_update`, the state is that of no step.

        Raises InterruptedRun if the run is to stop.
        """
        self.stop.check()
        self._settled = False

    def end_update(self, step: int, metrics: dict[str, float]) -> None:
        """Call it once the weights of a step are learned: from then on the step can be saved."""
        self.progress = self.state(step)
        self._settled, self._unlogged = True, metrics
        for path, cause in self._faults.new():
            logger.warning("step %d: an optimizer step was left out: %s; see %s", step, cause, path)

    @contextmanager
    def _traced(self, step: int) -> Iterator[None]:
        """Traces the step if the profiler's settings select it; with the profiler on, logs slow phases."""
        settings = self._settings.profiler
        traced = settings.enable and step in settings.steps
        if traced:
            calls = [call for group in self._groups.all for call in group.start(TrainingRole.start_trace)]
            wait(calls, self._settings.worker_timeout)
        yield
        if traced:
            directory = settings.dir or self.run_dir / "traces"
            for group in self._groups.all:
                group.call(TrainingRole.stop_trace, directory, step, group.role)
            logger.info("traces of step %d in %s", step, directory)
        if settings.enable:
            for slow in self._slow_phases.of_step(self.tracker.seconds):
                logger.warning("step %d: %s", step, slow)

    def save_last(self, rounds: int = ROUNDS) -> None:
        """Writes a checkpoint of the last finished step, unless it exists or `save_freq` is 0.

        Raises CheckpointError.
        """
        if self._settings.save_freq != 0 and self.progress.step > 0:
            with self.tracker.phase("save"):
                self.saver.save(self.progress, rounds)

    def export(self) -> None:
        """Writes the final model, in the spare directory if the run's own cannot be written; see `write_final_model`.

        Raises CheckpointError.
        """
        step, settings = self.progress.step, self._settings

        def describe(directory: Path) -> None:
            self.tracker.flush()  # the card reads the metrics
            write_model_card(directory, self.run_dir, step, self._model, self._dump)

        with self.tracker.phase("export"):
            directories = run_directories(settings, self.run_dir)
            run_dir = write_final_model(self._groups.actor, directories, describe, self.saver, settings.worker_timeout)
        if run_dir != self.run_dir:
            logger.warning("the final model is in %s", run_dir / "model")
        self.certificate.model(step, run_dir / "model")

    def _end(self) -> None:
        """Writes the last checkpoint and the final model, each whether or not the other can be written."""
        troubles: list[CheckpointError] = []
        for write in (self.save_last, self.export):
            try:
                write()
            except CheckpointError as error:
                troubles.append(error)
        if not troubles:
            return
        step, saved = self.progress.step, self.saver.step == self.progress.step
        what = " and ".join(str(error) for error in troubles)
        hint = (
            f"the checkpoint of step {step} is whole: `python -m trainer export {self.run_dir}` makes the model of it"
        )
        if not saved and self.saver.last is None:
            hint = "there is no checkpoint to continue from"
            hint += ", because trainer.save_freq=0" if self._settings.save_freq == 0 else ""
        elif not saved:
            hint = f"the last checkpoint is {self.saver.last}: continue from it with trainer.resume={self.saver.last}"
        raise CheckpointError(f"the run took all its {step} steps, but its end is not written: {what}", hint=hint)

    def state(self, step: int) -> TrainingState:
        """The run's state after a step."""
        return TrainingState(
            step=step,
            seed=self._settings.seed,
            sampler=self._sampler.state_dict(),
            config=self._dump,
            lowered=self._lowered,
        )

    def _save_before_ending(self) -> None:
        """Saves the last finished step of a run that fails, if the learner still holds it."""
        if self._unlogged is not None:
            self.tracker.log(self.progress.step, {**self._unlogged, INTERRUPTED: 1.0})
        if not self._settled:
            logger.warning("no checkpoint of step %d: it failed while it changed the weights", self.progress.step + 1)
        elif self._settings.save_freq != 0 and self.saver.healthy():
            try:
                self.save_last(rounds=1)
            except TrainerError as error:
                logger.error("step %d is lost: %s; %s", self.progress.step, error, error.hint)

    def _how_to_continue(self) -> str:
        last = self.saver.last
        return "" if last is None else f"continue with trainer.resume={last}"
