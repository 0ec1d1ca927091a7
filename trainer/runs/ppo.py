"""The controller of a PPO run: one process that calls all workers. `Controller.step` is one step, top to bottom."""

import logging
import math
import time
from collections.abc import Sequence
from copy import copy, deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil

from trainer.background import ended_within
from trainer.cluster.calls import stalls_explained
from trainer.cluster.connection import connected
from trainer.cluster.ready import wait_for_ray
from trainer.config.custom_code import code_lines
from trainer.config.tree import Config
from trainer.errors import ConfigError, LoweredLimit, WatchdogError
from trainer.experience.asynchronous import AsynchronousPipeline
from trainer.experience.collector import Collector
from trainer.experience.pipeline import Pipeline
from trainer.experience.run_data import RunData
from trainer.experience.sampled_ahead import FILE, resumable_steps, write_steps
from trainer.models.files import check_models, with_local_models
from trainer.models.weight_files import check_weights
from trainer.planning.placement import roles_of
from trainer.records.files.owner import RunOwner
from trainer.records.tracking import Tracker
from trainer.rollout.engines import Engines
from trainer.runs.advantages import resampled, with_advantages
from trainer.runs.checkpoints.checkpoint import read_resumed
from trainer.runs.checkpoints.manifest import TrainingState
from trainer.runs.checkpoints.places import recorded_step, run_directory, with_last_checkpoint
from trainer.runs.corrections import check_exact
from trainer.runs.interfaces import ActorRole, CriticRole, ReferenceRole
from trainer.runs.loop import TrainingResult, TrainingRun
from trainer.runs.recovery.memory import all_lowered, restarted, with_limits
from trainer.runs.recovery.watchdogs import Watchdogs, most_severe
from trainer.runs.reproduction.writer import CertificateWriter, Repeat, hardware_of
from trainer.runs.responses import ResponseRecords
from trainer.runs.stop_signal import StopSignal
from trainer.runs.workers import Workers, connect_ranks, find_plan, start_workers

logger = logging.getLogger(__name__)

# The fields of a batch that a role's optimizer steps read, besides the tokens.
ACTOR_READS = ("old_log_probs", "reference_log_probs", "teacher_log_probs", "advantages", "corrections")
CRITIC_READS = ("values", "returns")


def train(config: Config, repeat: Repeat | None = None) -> TrainingResult:
    """Runs PPO on the Ray cluster at RAY_ADDRESS, or on this machine; `repeat` is what a replay repeats.

    Raises a TrainerError for every problem that the user can fix, InterruptedRun after SIGTERM.
    """
    config.trainer.check_resume()
    run_dir = run_directory(config.trainer)
    local = with_local_models(config)
    check_models(local)
    check_weights(local)
    for line in code_lines(local):
        logger.info("%s", line)
    data = RunData.load(local)  # before any process starts: an error in a file costs seconds
    wait_for_ray()  # so far nothing is written: if Ray never is up, nothing is left
    with RunOwner(run_dir) as owner, stalls_explained(config.trainer, run_dir):
        return restarted(config, run_dir, partial(_train, run_dir, owner, repeat, local, data))


def _train(
    run_dir: Path,
    owner: RunOwner,
    repeat: Repeat | None,
    local: Config,
    data: RunData,
    given: Config,
    lowered: Sequence[LoweredLimit],
    again: bool,
) -> TrainingResult:
    """One attempt. `given` are the user's own settings, `local` the same with local models; see `restarted`."""
    config = local.model_copy(update={"trainer": with_last_checkpoint(given).trainer})
    data = replace(data, sampler=copy(data.sampler))  # an attempt before this one has drawn from it
    settings = config.trainer
    resumed = read_resumed(config, list(config.trained))
    with (
        Tracker(run_dir, config, recorded_step(given.trainer, run_dir, resumed, again)) as tracker,
        connected(run_dir),
        StopSignal(owner.check) as stop,
        CertificateWriter(run_dir, given, config, config, repeat) as certificate,
    ):
        with tracker.phase("start_up"):
            planned = find_plan(config, roles_of(config))
            config = with_limits(planned.config, all_lowered(resumed, lowered))
            workers = start_workers(config, planned.placement)
            tracker.expect(certificate.last_step(data.steps(config)))
            connect = partial(
                connect_ranks,
                run_dir=run_dir,
                run_steps=data.planned_steps(config),
                timeout=settings.worker_timeout,
            )
            connect(workers.training.all)
            certificate.prepare(hardware_of(workers.training.all, len(workers.rollout)), settings.checkpoint)
            controller = Controller(config, run_dir, tracker, stop, workers, data, certificate)
            controller.begin(resumed, lowered)
            tracker.begin()
            certificate.begin()
            controller.keep_copies(connect)
        try:
            controller.run()
        finally:
            limit = settings.worker_timeout
            ended_within(limit, controller.pipeline.close, "sampling ahead")
            ended_within(limit, controller.collector.close, "rewards, environments and programs")
            ended_within(limit, controller.records.close, f"trajectories in {run_dir}")
        return controller.result()


class Controller(TrainingRun):
    """Takes the steps of a PPO run; owns its workers and data."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        tracker: Tracker,
        stop: StopSignal,
        workers: Workers,
        data: RunData,
        certificate: CertificateWriter,
    ) -> None:
        self.config = config
        self.roles = workers.training
        self.on_shared_gpus = workers.on_shared_gpus
        self.engines = Engines(workers.rollout, workers.training.actor, config, workers.on_shared_gpus)
        self.data = data
        self.collector = Collector(config, self.engines, workers.reward, data)
        mode = config.trainer.mode
        if mode == "one_step_off" and workers.on_shared_gpus:
            raise ConfigError(
                f"trainer.mode={mode}: the engines share their GPUs with the actor, so they cannot sample beside it",
                hint="give them GPUs of their own with device_mapping.rollout and device_mapping.actor, or set "
                "trainer.mode=asynchronous",
            )
        self.pipeline: Pipeline | AsynchronousPipeline
        if mode == "asynchronous":
            self.pipeline = AsynchronousPipeline(self.collector, data.sampler, tracker.phase, workers.on_shared_gpus)
        else:
            self.pipeline = Pipeline(self.collector, data.sampler, tracker.phase, ahead=mode == "one_step_off")
        self.kl_coefficient = config.algorithm.kl_coefficient
        self.exact_matches: list[float] = []
        self.watchdogs = Watchdogs(config.watchdogs)
        self.records = ResponseRecords(config, run_dir, self.collector.texts)
        tracker.flush_too(self.records.flush)  # no checkpoint stands without the responses of its steps
        self.after_update: dict[str, float] = {}
        self.sampled_step = 0  # the last one whose samples are recorded
        self.unproven = config.is_exact  # the actor's log-probs are yet to be compared with the engines'
        shared = (config, run_dir, tracker, stop, workers.training, certificate, data.sampler, data.steps(config))
        super().__init__(*shared, engines=workers.rollout)
        if (lag := self.watchdogs.lag) is not None:
            self.saver.keep_for_roll_backs(lag)

    def begin(self, resumed: TrainingState | None, lowered: Sequence[LoweredLimit] = ()) -> None:
        """Continues from a checkpoint if there is one, and gives the engines their first weights."""
        super().begin(resumed, lowered)
        self.engines.start()
        if resumed is None:
            return
        if resumed.kl_coefficient is not None and self.config.algorithm.kl_control == "adaptive":
            self.kl_coefficient = resumed.kl_coefficient
        if self.config.trainer.checkpoint is not None:
            file = self.config.trainer.checkpoint / FILE
            between = (resumed.config, self._dump)
            self.pipeline.restore(resumable_steps(file, self.data.training, self.engines.version, *between))
        self.watchdogs.recall(resumed.watched)
        self.after_update = {name: math.nan if own is None else own for name, own in resumed.after_update.items()}
        self.exact_matches += [] if resumed.exact_match is None else [resumed.exact_match]
        self.records.truncate(resumed.step)

    def write_beside(self, directory: Path) -> dict[str, str]:
        """Writes the responses that were sampled for the steps to come. Raises CheckpointError."""
        steps = self.pipeline.sampled_ahead(self.progress.step)
        return {FILE: write_steps(steps, directory / FILE, self.engines.version)} if steps else {}

    def result(self) -> TrainingResult:
        first, last = (self.exact_matches[0], self.exact_matches[-1]) if self.exact_matches else (None, None)
        return TrainingResult(self.run_dir, self.progress.step, first, last)

    def step(self, step: int) -> dict[str, float]:
        """One step of policy optimisation (PPO: Schulman et al. 2017, arXiv:1707.06347); its metrics."""
        phase, started = self.tracker.phase, time.perf_counter()
        actor, critic, reference = self.roles.actor, self.roles.critic, self.roles.reference
        experience = self.pipeline.take(step, self.last_step)  # phase generate
        if self.on_shared_gpus:
            with phase("sleep"):
                self.engines.sleep()
        with phase("batch"):
            batch = experience.batch()
        tokens = int(batch.lengths.sum())
        if self.config.needs_old_log_probs(step) or self.unproven:
            batch = batch.with_(old_log_probs=self.forward_pass("old_log_prob", actor, ActorRole.log_probs, batch))
        if self.unproven:
            check_exact(batch)
            self.unproven = False
        if self.config.engines_know_old_log_probs:
            batch = batch.with_(old_log_probs=batch.rollout_log_probs)
        if self.config.algorithm.estimator.needs_squared_probabilities:
            found = self.forward_pass("squared_probabilities", actor, ActorRole.squared_probabilities, batch)
            batch = batch.with_(squared_probabilities=found)
        if reference:
            found = self.forward_pass("reference", reference, ReferenceRole.reference_log_probs, batch)
            batch = batch.with_(reference_log_probs=found)
        if self.roles.teacher:
            found = self.forward_pass("teacher", self.roles.teacher, ReferenceRole.reference_log_probs, batch)
            batch = batch.with_(teacher_log_probs=found)
        if critic:
            batch = batch.with_(values=self.forward_pass("values", critic, CriticRole.values, batch))
        with phase("reward"):  # most of it ran beside the passes
            scores = experience.scores.result()
        if step > self.sampled_step:  # not again if the step is taken again
            self.tracker.log_samples(step, self.records.samples(experience, scores.values.tolist()))
            self.sampled_step = step
        with phase("advantages"):
            batch, metrics, self.kl_coefficient = with_advantages(
                batch, experience, scores, self.collector, self.kl_coefficient
            )
            shares = self.config.trainer.mode != "synchronous"
            metrics |= experience.staleness(self.engines.version, shares)
        self.begin_update()
        self.records.write_step(step, experience, scores, batch)
        if self.may_update(step, metrics):
            batch = resampled(batch, experience, scores, self.collector, step)
            if critic:
                read = batch.with_only(*CRITIC_READS)
                metrics |= self.update_pass("update_critic", critic, read, self.config.critic.mini_batch_size)
            if step > self.config.trainer.critic_warmup:
                read = batch.with_only(*ACTOR_READS)
                metrics |= self.update_pass("update_actor", actor, read, self.config.actor.mini_batch_size)
                if "actor/kl_loss" in metrics:  # where no pass before the update has measured the KL
                    metrics.setdefault("reference/kl", metrics["actor/kl_loss"])
                self.after_update = {
                    name: metrics[name] for name in ("actor/entropy", "reference/kl") if name in metrics
                }
        self.end_update(step, metrics)
        with phase("sync_weights"):
            self.engines.gather_weights()
        with self.pipeline.paused(), phase("sync_weights"):
            work = self.engines.take_work()
            metrics |= self.engines.sync_weights()
        waited = self.tracker.seconds.get("time/generate", 0.0)
        self.efficiency.engines_did(work, waited if self.config.trainer.mode == "synchronous" else None)
        metrics["rollout/repairs"] = self.engines.take_repairs()
        metrics["reward/repairs"] = self.collector.reward.take_repairs()
        seconds = time.perf_counter() - started
        return metrics | {"time/step": seconds, "throughput/tokens_per_second": tokens / seconds}

    def may_update(self, step: int, metrics: dict[str, float]) -> bool:
        """Whether the watchdogs allow an update. They see this step's metrics and those of the last update; the alarms
        are added to `metrics`.

        Rolls back if an alarm demands it. Raises WatchdogError if one demands a stop.
        """
        metrics["memory/node_gib"] = psutil.virtual_memory().used / 2**30
        alarms = self.watchdogs.look(self.after_update | metrics)
        # Sampled metrics measure the weights of the previous step, those of its update perhaps the weights before it.
        newest = {name: step - (1 if name in metrics else 2) for name in (*self.after_update, *metrics)}
        self.after_update = {}
        for alarm in alarms:
            metrics[f"watchdog/{alarm.name}"] = 1.0
            logger.warning("watchdog %s (%s): %s", alarm.name, alarm.action, alarm.message)
        action = most_severe(alarms)
        if action == "stop":
            alarm = next(alarm for alarm in alarms if alarm.action == "stop")
            self._settled = True  # the weights are still those of the last step, so the run can save them
            raise WatchdogError(
                f"watchdog {alarm.name}: {alarm.message}",
                hint=f"look at the curves, or set watchdogs.{alarm.name}.action=log to continue regardless",
            )
        if action == "roll_back":
            faults = [alarm for alarm in alarms if alarm.action == "roll_back"]
            self._roll_back(min(newest[alarm.metric] - (alarm.steps - 1) for alarm in faults))
        return action not in ("skip", "roll_back")

    def _roll_back(self, faulty: int) -> None:
        """Loads the weights of the last checkpoint before step `faulty`, the first whose weights may be at fault."""
        with self.tracker.phase("save"):
            self.saver.settle()
        found = self.saver.before(faulty)
        if found is None:
            logger.warning("no checkpoint from before step %d to roll back to: only the update is skipped", faulty)
            return
        logger.warning("rolled back to the weights of %s, from before step %d", found, faulty)
        self.load_weights(found)
        self.watchdogs.forget()
        self.saver.schedule.retry(0.0)  # so that the newest checkpoint is not the faulty one

    def validate(self) -> dict[str, float]:
        """Metrics of responses to the held-out prompts."""
        with self.pipeline.paused(), self.tracker.phase("validate"):
            found = self.collector.validate()
            self.engines.take_work()  # it is no part of a step
        self.records.write_validation(self.progress.step, found)
        exact_match = found.metrics["validation/exact_match"]
        self.exact_matches.append(exact_match)
        self.progress = self.progress.model_copy(update={"exact_match": exact_match})
        return found.metrics

    def remember(self) -> None:
        self.remembered = deepcopy((self.kl_coefficient, self.after_update, self.exact_matches, self.watchdogs))
        self.remembered_version = self.engines.version

    def return_to(self, _state: TrainingState) -> None:
        """Takes the interrupted step again with the responses that were sampled for it, so the sampler stays."""
        found = deepcopy(self.remembered)
        self.kl_coefficient, self.after_update, self.exact_matches, self.watchdogs = found
        with self.pipeline.paused():
            self.engines.version = self.remembered_version  # an update that they got already is undone
            self.engines.reconnect()

    def good_enough(self) -> bool:
        stop_at = self.config.trainer.stop_at
        return stop_at is not None and bool(self.exact_matches) and self.exact_matches[-1] >= stop_at

    def state(self, step: int) -> TrainingState:
        own = {
            "kl_coefficient": self.kl_coefficient,
            "exact_match": self.exact_matches[-1] if self.exact_matches else None,
            "sampler": self.pipeline.sampler_state(),
            "watched": self.watchdogs.seen(),
            "after_update": dict(self.after_update),
        }
        return super().state(step).model_copy(update=own)
