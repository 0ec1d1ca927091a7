"""The start that all kinds of run share: records, cluster, plan, workers, and the state to continue."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from trainer.background import in_background
from trainer.cluster.connection import connected
from trainer.cluster.workers import WorkerGroup
from trainer.config.tree import RunConfig, WorkersConfig
from trainer.errors import LoweredLimit
from trainer.records.console import RUN_COLUMNS, Column
from trainer.records.tracking import Tracker
from trainer.runs.checkpoints.checkpoint import hashed_inputs, read_resumed, starting_files
from trainer.runs.checkpoints.manifest import TrainingState
from trainer.runs.checkpoints.places import recorded_step, run_directories, with_last_checkpoint
from trainer.runs.checkpoints.saving import Saver, SaveSchedule
from trainer.runs.efficiency import Efficiency
from trainer.runs.interfaces import TrainedRole, TrainingRole
from trainer.runs.passes import Passes
from trainer.runs.recovery.memory import all_lowered, with_limits
from trainer.runs.reproduction.writer import CertificateWriter, Repeat, hardware_of
from trainer.runs.stop_signal import StopSignal
from trainer.runs.workers import Workers, connect_ranks, find_plan, start_workers

S_co = TypeVar("S_co", covariant=True)


@dataclass(frozen=True)
class Session:
    """A run that has started. `config` are the workers' settings, with a value for every choice; `lowered` are the
    limits that were lowered before, in this process or in the part of the run that it continues."""

    config: WorkersConfig
    run_dir: Path
    last_step: int
    resumed: TrainingState | None
    lowered: Sequence[LoweredLimit]
    workers: Workers
    connect: Callable[[Sequence[WorkerGroup[TrainingRole]]], None]
    tracker: Tracker
    stop: StopSignal
    certificate: CertificateWriter
    efficiency: Efficiency
    passes: Passes
    saver: Saver

    def load_weights(self, checkpoint: Path) -> None:
        """Gives every trained role the weights and the optimizer of a checkpoint."""
        for group in self.workers.training.trained:
            group.call(TrainedRole.load, checkpoint / group.role)


@dataclass(frozen=True)
class RunKind(Generic[S_co]):
    """What a kind of run adds to the start.

    `config` are the workers' settings, whose models are local directories; `rows` is the number of training rows.
    `open` makes the steps, and closes what they use in the end. config.json holds `config`, or with `records_given` the
    user's own settings.
    """

    config: WorkersConfig
    roles: Sequence[str]
    rows: int
    open: Callable[[Session], AbstractContextManager[S_co]]
    columns: Sequence[Column] = RUN_COLUMNS
    records_given: bool = False


@contextmanager
def started(
    kind: RunKind[object],
    run_dir: Path,
    stopping: Callable[[], None],
    repeat: Repeat | None,
    given: RunConfig,
    lowered: Sequence[LoweredLimit],
    again: bool,
) -> Iterator[Session]:
    """A run on workers that have connected. `given`, `lowered` and `again` are those of an attempt; see `restarted`.
    Between two steps `stopping` may raise an error that ends the run."""
    config = kind.config.model_copy(update={"trainer": with_last_checkpoint(given).trainer})
    recorded = given if kind.records_given else config
    resumed = read_resumed(config, list(config.trained))
    lowered = all_lowered(resumed, lowered)
    with (
        Tracker(run_dir, recorded, recorded_step(given.trainer, run_dir, resumed, again), kind.columns) as tracker,
        connected(run_dir),
        StopSignal(stopping) as stop,
        CertificateWriter(run_dir, given, recorded, config, repeat) as certificate,
    ):
        with tracker.phase("start_up"):
            planned = find_plan(config, kind.roles)
            config = with_limits(planned.config, lowered)
            settings = config.trainer
            workers = start_workers(config, planned.placement)
            groups = workers.training
            last_step = certificate.last_step(config.steps(kind.rows))
            tracker.expect(last_step)
            run_steps = config.planned_steps(kind.rows)
            connect = partial(connect_ranks, run_dir=run_dir, run_steps=run_steps, timeout=settings.worker_timeout)
            connect(groups.all)
            certificate.prepare(hardware_of(groups.all, len(workers.rollout or ())), settings.checkpoint)
            efficiency = Efficiency(config, groups.all, workers.rollout)
            passes = Passes(tracker.phase, efficiency)
            # Beside the run: a large model takes minutes.
            inputs = in_background(partial(hashed_inputs, starting_files(config)), "hashes of the models and the data")
            saver = Saver(
                groups.trained,
                run_directories(settings, run_dir),
                settings.keep_checkpoints,
                SaveSchedule(settings),
                written=certificate.checkpoint,
                flush_records=tracker.flush,
                inputs=inputs.result,
            )
        records = (tracker, stop, certificate, efficiency, passes, saver)
        yield Session(config, run_dir, last_step, resumed, lowered, workers, connect, *records)
