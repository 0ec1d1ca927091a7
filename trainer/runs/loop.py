"""The loop of every training run: steps, checkpoints, and the end."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from trainer.cluster.calls import task, wait
from trainer.cluster.workers import WorkerGroup
from trainer.config.trainer import TrainerConfig
from trainer.config.tree import RunConfig
from trainer.data.batch import Batch
from trainer.data.dataset import PromptSampler
from trainer.errors import InterruptedRun, RewardError, TrainerError, WatchdogError
from trainer.records.atomic import atomic_directory
from trainer.records.model_card import write_model_card
from trainer.records.profiling import SlowPhases
from trainer.records.tracking import Tracker
from trainer.runs.checkpoint import TrainingState, fingerprint, last_checkpoint
from trainer.runs.interfaces import ActorRole, TrainedRole, TrainingRole
from trainer.runs.saving import Saver
from trainer.runs.stop_signal import StopSignal
from trainer.runs.workers import TrainingGroups
from trainer.training.garbage import collect_garbage

logger = logging.getLogger(__name__)

C = TypeVar("C", bound=RunConfig)
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


def run_directory(settings: TrainerConfig) -> Path:
    """The run's directory: `output_dir/run_id`, the resumed run's directory, or one named after the time."""
    if settings.run_id is None and settings.checkpoint is not None:
        return settings.checkpoint.parent.parent
    return settings.output_dir / (settings.run_id or datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ"))


def with_last_checkpoint(config: C) -> C:
    """The settings with `trainer.resume=auto` replaced by the run's last checkpoint, or by None without one."""
    settings = config.trainer
    if not settings.resumes_itself:
        return config
    found = last_checkpoint(run_directory(settings).expanduser())
    logger.info("trainer.resume=auto: %s", found or "no checkpoint yet, the run starts anew")
    return config.model_copy(update={"trainer": settings.model_copy(update={"resume": found})})


def recorded_step(settings: TrainerConfig, resumed: TrainingState | None) -> int | None:
    """Last step to keep in the run's records; -1 truncates everything, None starts fresh.

    `settings` are the user's own: with `trainer.resume=auto` and no checkpoint yet, all steps are recorded again.
    """
    if resumed is not None:
        return resumed.step
    return -1 if settings.resumes_itself else None


class TrainingRun:
    """The loop over the steps of a run, its checkpoints and its end. Each kind of run adds `step` and `validate`."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        tracker: Tracker,
        stop: StopSignal,
        groups: TrainingGroups,
        sampler: PromptSampler,
        last_step: int,
    ) -> None:
        self._settings = config.trainer
        self._dump = config.model_dump(mode="json")
        self._model = config.model.directory
        self._fingerprint = fingerprint(self._model)
        self._groups = groups
        self._sampler = sampler
        self.run_dir = run_dir
        self.tracker = tracker
        self._slow_phases = SlowPhases(config.trainer.profiler)
        self.stop = stop
        self.last_step = last_step
        self.saver = Saver(groups.trained, run_dir, config.trainer.keep_checkpoints)
        self.progress = self.state(0)

    def step(self, step: int) -> dict[str, float]:
        """Takes a step; its metrics. Raises InterruptedRun, RewardError, WatchdogError before anything changes."""
        raise NotImplementedError

    def validate(self) -> dict[str, float]:
        """Measures the model; the metrics."""
        raise NotImplementedError

    def good_enough(self) -> bool:
        """Whether the run may end early."""
        return False

    def begin(self, resumed: TrainingState | None) -> None:
        """Continues from a checkpoint if there is one."""
        checkpoint = self._settings.checkpoint
        if resumed is None or checkpoint is None:
            return
        self._sampler.load_state_dict(resumed.sampler)
        self.load_weights(checkpoint)
        self.progress = resumed
        self.saver.last, self.saver.step = checkpoint, resumed.step
        if resumed.step >= self.last_step:
            logger.warning(
                "%s is of step %d and the run has %d: nothing is left to do; raise trainer.total_steps or total_epochs",
                checkpoint,
                resumed.step,
                self.last_step,
            )

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
        try:
            if settings.validate_only:
                self.tracker.log(self.progress.step, self.validate())
                return
            if self.progress.step == 0 and settings.test_before_training:
                self.tracker.log(0, self.validate())
            while self.progress.step < self.last_step and not self.good_enough():
                step = self.progress.step + 1
                with self._traced(step):
                    metrics = self.step(step)
                metrics |= self.saver.attempt(self.saver.look)
                self.progress = self.state(step)
                if step == self.last_step or (settings.test_freq > 0 and step % settings.test_freq == 0):
                    metrics |= self.validate()
                self.tracker.log(step, metrics)
                if settings.save_freq > 0 and step % settings.save_freq == 0:
                    self.save_beside()
                self.stop.check()
            self.save_last()
        except (InterruptedRun, RewardError, WatchdogError) as error:
            raise self._leave(error) from error
        finally:
            self.saver.close()
        self.export()

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

    def save_beside(self) -> None:
        """Starts a checkpoint of the last finished step; it is written while the run continues."""
        with self.tracker.phase("save"):
            self.saver.attempt(self.saver.finish)
            self.saver.attempt(lambda: self.saver.start(self.progress))

    def save_last(self) -> None:
        """Writes a checkpoint of the last finished step, unless it exists or `save_freq` is 0."""
        with self.tracker.phase("save"):
            self.saver.attempt(self.saver.finish)
            if self._settings.save_freq != 0 and self.saver.step < self.progress.step:
                self.saver.start(self.progress)
                self.saver.finish()

    def export(self) -> None:
        """Writes the policy as a model directory that Transformers and vLLM can load."""
        with self.tracker.phase("export"), atomic_directory(self.run_dir / "model") as partial:
            self._groups.actor.call(ActorRole.export, partial)
            write_model_card(partial, self.run_dir, self.progress.step, self._model, self._dump)

    def state(self, step: int) -> TrainingState:
        """The run's state after a step."""
        return TrainingState(
            step=step,
            seed=self._settings.seed,
            sampler=self._sampler.state_dict(),
            model=self._fingerprint,
            config=self._dump,
        )

    def _leave(self, error: TrainerError) -> TrainerError:
        """Saves the run; the error to end with.

        These errors are raised before a step changes anything, so the state is that of the last finished step.
        """
        self.save_last()
        step, last = self.progress.step, self.saver.last
        hint = f"continue with trainer.resume={last}" if last is not None and self.saver.step == step else ""
        if isinstance(error, InterruptedRun):
            return InterruptedRun(f"stopped by SIGTERM after step {step}", hint=hint)
        return type(error)(str(error), hint="; then ".join(filter(None, [error.hint, hint])))


def forward(group: WorkerGroup[W], method: Callable[[W, Batch], Tensor], batch: Batch) -> Tensor:
    """A forward pass over the batch, a shard per rank: [rows, response length], in the order of the rows."""
    shards, sequences = batch.shards(len(group)), batch.with_only()
    results = torch.cat(group.call_each(task(method, sequences.rows(shard)) for shard in shards))
    return results[torch.cat(shards).argsort()]


def update(group: WorkerGroup[TrainedRole], batch: Batch, mini_batch_size: int) -> dict[str, float]:
    """A role's optimizer steps on the batch; the metrics of its first rank."""
    shards = batch.shards(len(group), mini_batch_size)
    return group.call_each(task(TrainedRole.update, batch.rows(shard)) for shard in shards)[0]
