"""The start that all kinds of run share: directory, records, cluster, plan, workers, and the state to continue."""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from trainer.background import in_background
from trainer.cluster.calls import stalls_explained
from trainer.cluster.connection import connected
from trainer.cluster.ready import wait_for_ray
from trainer.config.tree import RunConfig, WorkersConfig
from trainer.errors import LoweredLimit
from trainer.records.console import RUN_COLUMNS, Column
from trainer.records.files.owner import RunOwner
from trainer.records.tracking import Tracker
from trainer.runs.checkpoints.checkpoint import hashed_inputs, read_resumed, starting_files
from trainer.runs.checkpoints.manifest import TrainingState
from trainer.runs.checkpoints.places import recorded_step, run_directories, run_directory, with_last_checkpoint
from trainer.runs.checkpoints.saving import Saver, SaveSchedule
from trainer.runs.efficiency import Efficiency, Traces
from trainer.runs.ending import Ending
from trainer.runs.interfaces import TrainedRole
from trainer.runs.loop import Loop, Metrics, Step
from trainer.runs.passes import Passes
from trainer.runs.progress import Progress
from trainer.runs.recovery.memory import LoweredLimits, all_lowered, restarted, with_limits
from trainer.runs.recovery.redundancy import Connect, Copies, Recovery
from trainer.runs.reproduction.writer import CertificateWriter, Repeat, hardware_of
from trainer.runs.stop_signal import StopSignal
from trainer.runs.workers import Workers, connect_ranks, find_plan, start_workers

logger = logging.getLogger(__name__)

S = TypeVar("S", bound=Step)


@dataclass(frozen=True)
class Session:
    """A run that has started. `config` are the workers' settings, with a value for every choice."""

    config: WorkersConfig
    run_dir: Path
    last_step: int
    workers: Workers
    connect: Connect
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
class RunKind(Generic[S]):
    """What a kind of run adds to the start.

    `config` are the workers' settings, whose models are local directories; `rows` is the number of training rows.
    `open` makes the steps, and closes what they use in the end. config.json holds `config`, or with `records_given` the
    user's own settings.
    """

    config: WorkersConfig
    roles: Sequence[str]
    rows: int
    open: Callable[[Session], AbstractContextManager[S]]
    columns: Sequence[Column] = RUN_COLUMNS
    records_given: bool = False


@dataclass(frozen=True)
class FinishedRun(Generic[S]):
    run_dir: Path
    last_step: int
    steps: S


def run(given: RunConfig, prepare: Callable[[], RunKind[S]], repeat: Repeat | None = None) -> FinishedRun[S]:
    """Takes all steps of a run on the Ray cluster at RAY_ADDRESS, or on this machine.

    `given` are the user's own settings. `prepare` reads models and data, before any process starts: an error in a file
    costs seconds. `repeat` is what a replay repeats. Raises a TrainerError for every problem that the user can fix,
    InterruptedRun after SIGTERM.
    """
    given.trainer.check_resume()
    run_dir = run_directory(given.trainer)
    kind = prepare()
    wait_for_ray()  # so far nothing is written: if Ray never is up, nothing is left
    with RunOwner(run_dir) as owner, stalls_explained(given.trainer, run_dir):
        return restarted(given, run_dir, partial(_attempt, kind, run_dir, owner, repeat))


def _attempt(
    kind: RunKind[S],
    run_dir: Path,
    owner: RunOwner,
    repeat: Repeat | None,
    given: RunConfig,
    lowered: Sequence[LoweredLimit],
    again: bool,
) -> FinishedRun[S]:
    """One attempt; see `restarted`."""
    config = kind.config.model_copy(update={"trainer": with_last_checkpoint(given).trainer})
    recorded = given if kind.records_given else config
    resumed = read_resumed(config, list(config.trained))
    with (
        Tracker(run_dir, recorded, recorded_step(given.trainer, run_dir, resumed, again), kind.columns) as tracker,
        connected(run_dir),
        StopSignal(owner.check) as stop,
        CertificateWriter(run_dir, given, recorded, config, repeat) as certificate,
        ExitStack() as opened,
    ):
        with tracker.phase("start_up"):
            limits = all_lowered(resumed, lowered)
            session = _start(kind, config, limits, run_dir, tracker, stop, certificate)
            steps = opened.enter_context(kind.open(session))
            progress, loop = _begin(session, steps, resumed, limits)
        loop.run()
        return FinishedRun(run_dir, progress.step, steps)


def _start(
    kind: RunKind[S],
    config: WorkersConfig,
    limits: Sequence[LoweredLimit],
    run_dir: Path,
    tracker: Tracker,
    stop: StopSignal,
    certificate: CertificateWriter,
) -> Session:
    """Plans the run and starts its workers."""
    planned = find_plan(config, kind.roles)
    config = with_limits(planned.config, limits)
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
    passes = Passes(tracker.phase, efficiency)
    return Session(config, run_dir, last_step, workers, connect, tracker, stop, certificate, efficiency, passes, saver)


def _begin(
    session: Session, steps: Step, resumed: TrainingState | None, limits: Sequence[LoweredLimit]
) -> tuple[Progress, Loop]:
    """The loop after the checkpoint that the run continues from, with what follows each of its steps. `limits` are all
    that were lowered before."""
    config, tracker, saver, groups = session.config, session.tracker, session.saver, session.workers.training
    settings, recorded = config.trainer, config.model_dump(mode="json")
    lowered = LoweredLimits(groups, session.certificate, settings.worker_timeout, resumed.lowered if resumed else ())

    def state_after(step: int) -> TrainingState:
        fields = steps.state()
        state = TrainingState(step=step, seed=settings.seed, sampler=fields["sampler"], config=recorded)
        return state.model_copy(update={**fields, "lowered": lowered.limits})

    progress = Progress(state_after, session.stop, session.run_dir)
    if resumed is not None:
        progress.return_to(resumed)
    for limit in limits[len(lowered.limits) :]:
        lowered.note(limit, progress.step + 1)
    if resumed is not None and settings.checkpoint is not None:
        session.load_weights(settings.checkpoint)
        saver.resume(settings.checkpoint, resumed.step)
        if resumed.step >= session.last_step:
            logger.warning(
                "%s is of step %d and the run has %d: nothing is left to do; raise trainer.total_steps or total_epochs",
                *(settings.checkpoint, resumed.step, session.last_step),
            )
    steps.begin(resumed)
    tracker.begin()
    session.certificate.begin()
    recovery = None
    if settings.redundancy:
        copies = Copies(groups, session.connect, progress.state)
        recovery = Recovery(copies, steps.snapshot, progress, lowered, saver, tracker.phase)

    def look(_step: int, metrics: Metrics) -> None:
        metrics |= saver.look()

    def validate(step: int, metrics: Metrics) -> None:
        if step == session.last_step or (settings.test_freq > 0 and step % settings.test_freq == 0):
            metrics |= progress.validate(steps.validate)

    def record(step: int, metrics: Metrics) -> None:
        tracker.log_waits(step, session.efficiency.waiting)
        tracker.log(step, metrics)
        progress.logged()

    def save(step: int, _metrics: Metrics) -> None:
        if step < session.last_step and saver.schedule.due(step):
            with tracker.phase("save"):
                saver.begin(progress.state)

    copy = [recovery.observe] if recovery else []
    return progress, Loop(
        settings,
        steps,
        session.last_step,
        progress,
        tracker=tracker,
        stop=session.stop,
        efficiency=session.efficiency,
        traced=Traces(settings, session.run_dir, groups.all, tracker).traced,
        observers=[look, lowered.observe, progress.finish, validate, *copy, record, save],
        recovery=recovery,
        ending=Ending(config, session.run_dir, groups, progress, saver, tracker, session.certificate),
    )
