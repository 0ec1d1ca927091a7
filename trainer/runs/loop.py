"""What every training run has in common: the loop over its steps, checkpoints, and how it ends."""

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
from trainer.config.tree import RunConfig, TrainerConfig
from trainer.data.batch import Batch
from trainer.data.dataset import PromptSampler
from trainer.errors import InterruptedRun, RewardError, TrainerError, WatchdogError
from trainer.records.atomic import atomic_directory
from trainer.records.profiling import slow_phases
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

# Of torch in this process, whose tensors are small: with the 64 threads of a large host, dividing 2,048 rows among four
# ranks took 342 ms, with 8 it took 6.
THREADS = 8


@dataclass(frozen=True)
class TrainingResult:
    """How a run ended; the exact matches are the first and the last that this run measured."""

    run_dir: Path
    final_step: int
    first_exact_match: float | None
    last_exact_match: float | None


def run_directory(settings: TrainerConfig) -> Path:
    """Where the run writes: `output_dir/run_id`, the resumed run's directory, or one named by the time."""
    if settings.run_id is None and settings.resume is not None:
        return settings.resume.parent.parent
    return settings.output_dir / (settings.run_id or datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ"))


def with_last_checkpoint(config: C) -> C:
    """The same settings with `trainer.resume=auto` as the run's last checkpoint, or as nothing if it has none."""
    settings = config.trainer
    if not settings.resumes_itself:
        return config
    found = last_checkpoint(run_directory(settings).expanduser())
    logger.info("trainer.resume=auto: %s", found or "no checkpoint yet, the run starts anew")
    return config.model_copy(update={"trainer": settings.model_copy(update={"resume": found})})


def recorded_step(settings: TrainerConfig, resumed: TrainingState | None) -> int | None:
    """Up to which step the records of the run's directory are to be kept, as `Tracker` wants to know it.

    `settings` are as the user gave them: a run that resumes itself and has no checkpoint yet records all steps anew.
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
        self._fingerprint = fingerprint(config.model.directory)
        self._groups = groups
        self._sampler = sampler
        self.run_dir = run_dir
        self.tracker = tracker
        self.stop = stop
        self.last_step = last_step
        self.saver = Saver(groups.trained, run_dir, config.trainer.keep_checkpoints)
        self.progress = self.state(0)

    def step(self, step: int) -> dict[str, float]:
        """Takes a step; its metrics. Interruptions and refused rewards may end it as long as nothing has changed."""
        raise NotImplementedError

    def validate(self) -> dict[str, float]:
        """Measures the model; the metrics."""
        raise NotImplementedError

    def good_enough(self) -> bool:
        """Whether the run may end early."""
        return False

    def begin(self, resumed: TrainingState | None) -> None:
        """Continues from a checkpoint if there is one."""
        if resumed is None or self._settings.resume is None:
            return
        self._sampler.load_state_dict(resumed.sampler)
        self.load_weights(self._settings.resume)
        self.progress = resumed
        self.saver.last, self.saver.step = self._settings.resume, resumed.step
        if resumed.step >= self.last_step:
            logger.warning(
                "%s is of step %d and the run has %d: nothing is left to do; raise trainer.total_steps or total_epochs",
                self._settings.resume,
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
        collect_garbage()  # else while ranks wait for this process
        torch.set_num_threads(min(torch.get_num_threads(), THREADS))
        try:
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
        """Traces a step if it is one of those to trace; in every profiled one, tells which phases were slow."""
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
            for slow in slow_phases(self.tracker.seconds, settings):
                logger.warning("step %d: %s", step, slow)

    def save_beside(self) -> None:
        """Begins a checkpoint of the last finished step, which is written while the run goes on."""
        with self.tracker.phase("save"):
            self.saver.attempt(self.saver.finish)
            self.saver.attempt(lambda: self.saver.start(self.progress))

    def save_last(self) -> None:
        """Writes a checkpoint of the last finished step, unless there is one or never to be one."""
        with self.tracker.phase("save"):
            self.saver.attempt(self.saver.finish)
            if self._settings.save_freq != 0 and self.saver.step < self.progress.step:
                self.saver.start(self.progress)
                self.saver.finish()

    def export(self) -> None:
        """Writes the policy as a model directory that Transformers and vLLM load."""
        with self.tracker.phase("export"), atomic_directory(self.run_dir / "model") as partial:
            self._groups.actor.call(ActorRole.export, partial)

    def state(self, step: int) -> TrainingState:
        """Where the run stands after a step."""
        return TrainingState(
            step=step,
            seed=self._settings.seed,
            sampler=self._sampler.state_dict(),
            model=self._fingerprint,
            config=self._dump,
        )

    def _leave(self, error: TrainerError) -> TrainerError:
        """Saves what was reached; the error to end with.

        These causes strike before a step changes anything, so the state is that of the last finished step.
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
