"""PPO runs. `PpoStep.take` is one step, top to bottom."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from trainer.background import ended_within
from trainer.config.custom_code import code_lines
from trainer.config.tree import Config
from trainer.data.batches.batch import Batch
from trainer.data.published.by_name import with_local_data
from trainer.errors import ConfigError
from trainer.experience.asynchronous import AsynchronousPipeline
from trainer.experience.collector import Collector, Experience, Scores
from trainer.experience.hub_rows import with_hub_rows
from trainer.experience.pipeline import Pipeline
from trainer.experience.run_data import RunData
from trainer.experience.sampled_ahead import FILE, resumable_steps, write_steps
from trainer.models.files import check_models, with_local_models
from trainer.models.weight_files import check_weights
from trainer.planning.placement import roles_of
from trainer.rollout.engines import Engines
from trainer.runs.advantages import check_exact, resampled, with_advantages
from trainer.runs.checkpoints.manifest import TrainingState
from trainer.runs.interfaces import ActorRole, CriticRole, ReferenceRole
from trainer.runs.loop import run
from trainer.runs.recovery.watchdogs import UpdateGuard
from trainer.runs.reproduction.writer import Repeat
from trainer.runs.responses import ResponseRecords
from trainer.runs.session import RunKind, Session
from trainer.runs.step import Metrics, Progress

logger = logging.getLogger(__name__)

# The fields of a batch that a role's optimizer steps read, besides the tokens.
ACTOR_READS = (
    *("old_log_probs", "reference_log_probs", "teacher_log_probs", "advantages", "corrections", "counted"),
    "routes",
)
CRITIC_READS = ("values", "returns", "counted")


def train(config: Config, repeat: Repeat | None = None) -> Path:
    """Runs PPO; the run's directory. See `trainer.runs.loop.run`."""

    def prepare() -> RunKind[PpoStep]:
        local = with_local_data(with_hub_rows(with_local_models(config)))
        check_models(local)
        check_weights(local)
        for line in code_lines(local):
            logger.info("%s", line)
        data = RunData.load(local)
        return RunKind(local, roles_of(local), len(data.training), partial(open_steps, data))

    return run(config, prepare, repeat)


@contextmanager
def open_steps(data: RunData, session: Session) -> Iterator["PpoStep"]:
    """The steps of a run on this data."""
    config, workers, tracker = session.config, session.workers, session.tracker
    assert isinstance(config, Config)
    assert workers.rollout is not None
    assert workers.reward is not None
    data = replace(data, sampler=copy(data.sampler))  # an attempt before this one has drawn from it
    mode = config.trainer.mode
    if mode == "one_step_off" and workers.on_shared_gpus:
        raise ConfigError(
            f"trainer.mode={mode}: the engines share their GPUs with the actor, so they cannot sample beside it",
            hint="give them GPUs of their own with device_mapping.rollout and device_mapping.actor, or set "
            "trainer.mode=asynchronous",
        )
    engines = Engines(workers.rollout, workers.training.actor, config, workers.on_shared_gpus)
    collector = Collector(config, engines, workers.reward, data)
    pipeline: Pipeline | AsynchronousPipeline
    if mode == "asynchronous":
        pipeline = AsynchronousPipeline(collector, data.sampler, tracker.phase, workers.on_shared_gpus)
    else:
        pipeline = Pipeline(collector, data.sampler, tracker.phase, ahead=mode == "one_step_off")
    records = ResponseRecords(config, session.run_dir, collector.texts)
    tracker.flush_too(records.flush)  # no checkpoint stands without the responses of its steps
    guard = UpdateGuard(session, config.watchdogs)
    steps = PpoStep(config, session, data, engines, collector, pipeline, guard, records)
    session.saver.write_beside(steps.write_sampled_ahead)
    try:
        yield steps
    finally:
        limit = config.trainer.worker_timeout
        ended_within(limit, pipeline.close, "sampling ahead")
        ended_within(limit, collector.close, "rewards, environments and programs")
        ended_within(limit, records.close, f"trajectories in {session.run_dir}")


class PpoStep:
    """The steps of a PPO run: from prompts to updated weights in the engines."""

    def __init__(
        self,
        config: Config,
        session: Session,
        data: RunData,
        engines: Engines,
        collector: Collector,
        pipeline: Pipeline | AsynchronousPipeline,
        guard: UpdateGuard,
        records: ResponseRecords,
    ) -> None:
        self.config, self.tracker, self.passes = config, session.tracker, session.passes
        self.last_step, self.efficiency = session.last_step, session.efficiency
        self.roles, self.on_shared_gpus = session.workers.training, session.workers.on_shared_gpus
        self.data, self.engines, self.collector, self.pipeline = data, engines, collector, pipeline
        self.guard, self.records = guard, records
        self.kl_coefficient = config.algorithm.kl_coefficient
        self.exact_match: float | None = None
        self.sampled_step = 0  # the last one whose samples are recorded
        self.unproven = config.is_exact  # the actor's log-probs are yet to be compared with the engines'

    def take(self, number: int, progress: Progress) -> Metrics:
        """One step of policy optimisation (PPO: Schulman et al. 2017, arXiv:1707.06347); its metrics."""
        phase, started = self.tracker.phase, time.perf_counter()
        experience = self.pipeline.take(number, self.last_step)  # phase generate
        if self.on_shared_gpus:
            with phase("sleep"):
                self.engines.sleep()
        with phase("batch"):
            batch = experience.batch()
        lengths = batch.lengths.tolist()
        unrecorded = {} if batch.routes is None else {"rollout/unrecorded_routes": batch.routes.unrecorded(lengths)}
        batch = self.forward(number, batch)  # phases old_log_prob, reference, teacher, values
        with phase("reward"):  # most of it ran beside the passes
            scores = experience.scores.result()
        self.record_samples(number, experience, scores)
        with phase("advantages"):
            batch, metrics, self.kl_coefficient = with_advantages(
                batch, experience, scores, self.collector, self.kl_coefficient
            )
            metrics |= experience.staleness(self.engines.version, self.config.trainer.mode != "synchronous")
            metrics |= unrecorded
        with progress.updating(number, metrics):
            self.records.write_step(number, experience, scores, batch)
            if self.guard.allows(number, metrics):
                batch = resampled(batch, experience, scores, self.collector, number)
                self.update(number, batch, metrics)  # phases update_critic, update_actor
        self.sync_weights(metrics)
        metrics["rollout/repairs"] = self.engines.take_repairs()
        metrics["reward/repairs"] = self.collector.reward.take_repairs()
        seconds = time.perf_counter() - started
        return metrics | {"time/step": seconds, "throughput/tokens_per_second": sum(lengths) / seconds}

    def forward(self, number: int, batch: Batch) -> Batch:
        """The batch with what the networks compute before they change."""
        forward, actor, roles = self.passes.forward, self.roles.actor, self.roles
        if self.config.needs_old_log_probs(number) or self.unproven:
            batch = self.with_old_log_probs(batch)
        if self.unproven:
            check_exact(batch)
            self.unproven = False
        if self.config.engines_know_old_log_probs:
            batch = batch.with_(old_log_probs=batch.rollout_log_probs)
        if self.config.algorithm.estimator.needs_squared_probabilities:
            squares = forward("squared_probabilities", actor, ActorRole.squared_probabilities, batch, ("routes",))
            batch = batch.with_(squared_probabilities=squares)
        if roles.reference:
            log_probs = forward("reference", roles.reference, ReferenceRole.reference_log_probs, batch)
            batch = batch.with_(reference_log_probs=log_probs)
        if roles.teacher:
            log_probs = forward("teacher", roles.teacher, ReferenceRole.reference_log_probs, batch)
            batch = batch.with_(teacher_log_probs=log_probs)
        if roles.critic:
            batch = batch.with_(values=forward("values", roles.critic, CriticRole.values, batch))
        return batch

    def with_old_log_probs(self, batch: Batch) -> Batch:
        """The batch with log-probs of the actor, and with the experts of that pass if the update repeats them."""
        phase, actor = "old_log_prob", self.roles.actor
        if self.config.actor.router_replay == "recompute":
            log_probs, routes = self.passes.forward_recording(phase, actor, batch)
            return batch.with_(old_log_probs=log_probs, routes=routes)
        return batch.with_(old_log_probs=self.passes.forward(phase, actor, ActorRole.log_probs, batch, ("routes",)))

    def record_samples(self, number: int, experience: Experience, scores: Scores) -> None:
        """Records some responses, but not again if the step is taken again."""
        if number > self.sampled_step:
            self.tracker.log_samples(number, self.records.samples(experience, scores.recorded))
            self.sampled_step = number

    def update(self, number: int, batch: Batch, metrics: Metrics) -> None:
        """The optimizer steps of critic and actor."""
        if self.roles.critic:
            read = batch.with_only(*CRITIC_READS)
            rows = self.config.critic.mini_batch_size
            metrics |= self.passes.update("update_critic", self.roles.critic, read, rows)
        if number > self.config.trainer.critic_warmup:
            read = batch.with_only(*ACTOR_READS)
            rows = self.config.actor.mini_batch_size
            metrics |= self.passes.update("update_actor", self.roles.actor, read, rows)
            if "actor/kl_loss" in metrics:  # where no pass before the update has measured the KL
                metrics.setdefault("reference/kl", metrics["actor/kl_loss"])
            self.guard.updated(metrics)

    def sync_weights(self, metrics: Metrics) -> None:
        """Gives the engines the actor's weights, between two of their responses or segments."""
        with self.tracker.phase("sync_weights"):
            self.engines.gather_weights()
        with self.pipeline.paused(), self.tracker.phase("sync_weights"):
            work = self.engines.take_work()
            metrics |= self.engines.sync_weights()
        waited = self.tracker.seconds.get("time/generate", 0.0)
        self.efficiency.engines_did(work, waited if self.config.trainer.mode == "synchronous" else None)

    def validate(self, number: int) -> Metrics:
        """Metrics of responses to the held-out prompts."""
        with self.pipeline.paused(), self.tracker.phase("validate"):
            validation = self.collector.validate()
            self.engines.take_work()  # it is no part of a step
        self.records.write_validation(number, validation)
        self.exact_match = validation.metrics.get("validation/exact_match")  # none if every response failed
        return validation.metrics

    def begin(self, resumed: TrainingState | None) -> None:
        """Gives the engines their first weights, and continues from the state of a checkpoint if there is one."""
        if resumed is not None:
            self.data.sampler.load_state_dict(resumed.sampler)
        self.engines.start()
        if resumed is None:
            return
        if resumed.kl_coefficient is not None and self.config.algorithm.kl_control == "adaptive":
            self.kl_coefficient = resumed.kl_coefficient
        if self.config.trainer.checkpoint is not None:
            file = self.config.trainer.checkpoint / FILE
            between = (resumed.config, self.config.model_dump(mode="json"))
            self.pipeline.restore(resumable_steps(file, self.data.training, self.engines.version, *between))
        self.guard.resume(resumed)
        self.exact_match = resumed.exact_match
        self.records.truncate(resumed.step)

    def state(self) -> dict[str, Any]:
        return {
            "kl_coefficient": self.kl_coefficient,
            "exact_match": self.exact_match,
            "sampler": self.pipeline.sampler_state(),
            **self.guard.state(),
        }

    def write_sampled_ahead(self, directory: Path, step: int) -> dict[str, str]:
        """Writes the responses that were sampled for the steps after this one; the SHA-256 of the file.

        Raises CheckpointError.
        """
        ahead = self.pipeline.sampled_ahead(step)
        return {FILE: write_steps(ahead, directory / FILE, self.engines.version)} if ahead else {}

    def snapshot(self) -> Callable[[], None]:
        """The step is taken again with the responses that were sampled for it, so the sampler stays."""
        kl_coefficient, exact_match, version = self.kl_coefficient, self.exact_match, self.engines.version
        go_back_before_update = self.guard.snapshot()

        def go_back() -> None:
            self.kl_coefficient, self.exact_match = kl_coefficient, exact_match
            go_back_before_update()
            with self.pipeline.paused():
                self.engines.reconnect(version)  # an update that they got already is undone

        return go_back
