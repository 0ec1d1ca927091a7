"""What DPO, KTO and SFT runs have in common."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from trainer.cluster.calls import stalls_explained
from trainer.cluster.connection import connected
from trainer.cluster.workers import WorkerGroup
from trainer.config.offline import OfflineConfig
from trainer.config.sections.data import DataConfig
from trainer.config.tree import Config
from trainer.data.batches.batch import Batch
from trainer.data.completions import Completion
from trainer.data.dataset import PromptSampler, check_files
from trainer.data.formats.chat_template import use_chat_template
from trainer.data.subset import Subset
from trainer.errors import LoweredLimit
from trainer.models.files import check_models, load_tokenizer, with_local_models
from trainer.models.weight_files import check_weights
from trainer.records.console import Column
from trainer.records.files.owner import RunOwner
from trainer.records.tracking import Tracker
from trainer.runs.checkpoints.checkpoint import read_resumed
from trainer.runs.checkpoints.places import recorded_step, run_directory, with_last_checkpoint
from trainer.runs.interfaces import ActorRole, ReferenceRole
from trainer.runs.loop import (
    TrainingRun,
)
from trainer.runs.recovery.memory import all_lowered, restarted, with_limits
from trainer.runs.reproduction.writer import CertificateWriter, Repeat, hardware_of
from trainer.runs.stop_signal import StopSignal
from trainer.runs.workers import TrainingGroups, connect_ranks, find_plan, start_training

Example = TypeVar("Example")


class OfflineRun(TrainingRun, Generic[Example]):
    """Takes optimizer steps on batches of examples. Each kind of run adds `learn` and `measure`."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        tracker: Tracker,
        stop: StopSignal,
        groups: TrainingGroups,
        certificate: CertificateWriter,
        sampler: PromptSampler,
        training: Sequence[Example],
        validation: Sequence[Example],
    ) -> None:
        self.actor = groups.actor
        self.reference: WorkerGroup[ReferenceRole] = groups.reference or groups.actor  # without its adapters
        self.training, self.validation = training, validation
        self.sampler = sampler
        super().__init__(config, run_dir, tracker, stop, groups, certificate, sampler, config.steps(len(training)))

    def learn(self, examples: Sequence[Example]) -> tuple[Batch, dict[str, float]]:
        """The batch with advantages for an optimizer step, and metrics."""
        raise NotImplementedError

    def measure(self, examples: Sequence[Example], count: int) -> dict[str, float]:
        """Metrics of the first `count` examples. The others repeat the last one so that all ranks have rows."""
        raise NotImplementedError

    def step(self, _step: int) -> dict[str, float]:
        """One optimizer step on a batch of examples; its metrics."""
        started = time.perf_counter()
        batch, metrics = self.learn([self.training[index] for index in self.sampler.next_batch()])
        self.begin_update()
        metrics |= self.update_pass("update_actor", self.actor, batch, len(batch))
        seconds = time.perf_counter() - started
        throughput = int(batch.lengths.sum()) / seconds
        return {**metrics, "time/step": seconds, "throughput/tokens_per_second": throughput}

    def validate(self) -> dict[str, float]:
        count = len(self.validation)
        even = [*self.validation, *[self.validation[-1]] * (-count % len(self.actor))]
        with self.tracker.phase("validate"):
            return self.measure(even, count)

    def forward(self, batch: Batch) -> Batch:
        """The batch with the log-probs of actor and reference."""
        found = self.forward_pass("old_log_prob", self.actor, ActorRole.log_probs, batch)
        batch = batch.with_(old_log_probs=found)
        found = self.forward_pass("reference", self.reference, ReferenceRole.reference_log_probs, batch)
        return batch.with_(reference_log_probs=found)


def completion_batch(completions: Sequence[Completion]) -> Batch:
    """One row per completion; the mask marks the tokens that are learned."""
    prompts, responses, masks = zip(*((one.prompt, one.response, one.learned) for one in completions), strict=True)
    return Batch.from_responses(prompts, responses, None, masks)


def train_offline(
    settings: OfflineConfig,
    columns: Sequence[Column],
    read: Callable[[Sequence[Path], Any, DataConfig, Subset], Sequence[Example]],
    open_run: Callable[..., OfflineRun[Example]],
    repeat: Repeat | None = None,
    validates: bool = True,
) -> Path:
    """Takes all steps on the Ray cluster at RAY_ADDRESS or on this machine; the run's directory.

    `open_run` gets what `OfflineRun` does; `repeat` is what a replay repeats; `validates`: held-out files are needed.
    Raises TrainerError.
    """
    settings.trainer.check_resume()
    check_files(settings.data, ["train_files", "validation_files"] if validates else ["train_files"])
    run_dir = run_directory(settings.trainer)
    with RunOwner(run_dir) as owner, stalls_explained(settings.trainer, run_dir):
        return restarted(settings, run_dir, partial(_train, columns, read, open_run, run_dir, owner, repeat))


def _train(
    columns: Sequence[Column],
    read: Callable[[Sequence[Path], Any, DataConfig, Subset], Sequence[Example]],
    open_run: Callable[..., OfflineRun[Example]],
    run_dir: Path,
    owner: RunOwner,
    repeat: Repeat | None,
    settings: OfflineConfig,
    lowered: Sequence[LoweredLimit],
    again: bool,
) -> Path:
    config = with_local_models(with_last_checkpoint(settings.for_workers()))
    limit = config.trainer.worker_timeout
    check_models(config, settings.longest_row)
    check_weights(config)
    tokenizer = use_chat_template(load_tokenizer(config.model), config.data)
    data, seed = config.data, config.trainer.seed
    training = read(data.train_files, tokenizer, data, Subset.of_training(data, seed))
    validation = read(data.validation_files, tokenizer, data, Subset.of_validation(data, seed))
    sampler = PromptSampler.of(data, config.trainer, len(training))
    resumed = read_resumed(config, ["actor"])
    with (
        Tracker(run_dir, settings, recorded_step(settings.trainer, run_dir, resumed, again), columns) as tracker,
        connected(run_dir),
        StopSignal(owner.check) as stop,
        CertificateWriter(run_dir, settings, settings, config, repeat) as certificate,
    ):
        with tracker.phase("start_up"):
            separate = config.needs_reference and not config.actor_is_reference
            planned = find_plan(config, ["actor", "reference"] if separate else ["actor"])
            config = with_limits(planned.config, all_lowered(resumed, lowered))
            groups = start_training(config, planned.placement)
            planned_steps = config.planned_steps(len(training))
            connect = partial(connect_ranks, run_dir=run_dir, run_steps=planned_steps, timeout=limit)
            connect(groups.all)
            certificate.prepare(hardware_of(groups.all, 0), config.trainer.checkpoint)
            run = open_run(config, run_dir, tracker, stop, groups, certificate, sampler, training, validation)
            tracker.expect(run.last_step)
            run.begin(resumed, lowered)
            tracker.begin()
            certificate.begin()
            run.keep_copies(connect)
        run.run()
    return run_dir
