"""Direct preference optimisation (DPO): learns from pairs of responses, without sampling or rewards.

A step is a step of policy optimisation whose advantages say how strongly each response is to be preferred; see
`trainer.algorithms.dpo`. Actor and reference are those of every other run.
"""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator
from torch import Tensor

from trainer.algorithms.dpo import preference_advantages, preference_pairs
from trainer.algorithms.registry import PREFERENCE_LOSSES
from trainer.algorithms.rows import Pairs
from trainer.cluster.nodes import connected
from trainer.cluster.workers import WorkerGroup
from trainer.config.data import DataConfig
from trainer.config.optimization import check_read
from trainer.config.roles import ActorConfig
from trainer.config.section import Section, with_parameters
from trainer.config.tree import Config, RunConfig
from trainer.data.batch import Batch
from trainer.data.chat_template import use_chat_template
from trainer.data.dataset import PromptSampler
from trainer.data.preferences import PreferencePair, read_pairs
from trainer.data.subset import Subset
from trainer.models.files import check_models, load_tokenizer, with_local_models
from trainer.records.console import Column
from trainer.records.owner import RunOwner
from trainer.records.tracking import Tracker
from trainer.runs.checkpoint import read_checkpoint
from trainer.runs.interfaces import ActorRole, ReferenceRole
from trainer.runs.loop import TrainingRun, forward, recorded_step, run_directory, update, with_last_checkpoint
from trainer.runs.ppo import find_plan
from trainer.runs.stop_signal import StopSignal
from trainer.runs.workers import TrainingGroups, connect_ranks, start_training

COLUMNS = (
    Column("dpo/loss", "loss", ".4f"),
    Column("dpo/margin", "margin", ".3f"),
    Column("dpo/accuracy", "accuracy", ".1%"),
    Column("validation/preference_accuracy", "held-out accuracy", ".1%"),
    Column("time/step", "seconds", ".1f"),
)


if TYPE_CHECKING:
    PreferenceLossName = str
else:
    PreferenceLossName = Literal[tuple(PREFERENCE_LOSSES)]


@partial(with_parameters, tables=(PREFERENCE_LOSSES,))
class DpoSettings(Section):
    loss: PreferenceLossName = Field(
        "sigmoid", description="loss of a pair: trainer/algorithms/preference_losses/; sigmoid is DPO's own"
    )
    beta: float = Field(0.1, gt=0, description="how strongly the policy is held to the reference")

    @model_validator(mode="after")
    def _every_setting_is_read(self) -> Self:
        check_read(self, "loss", PREFERENCE_LOSSES)
        return self

    def losses(self, pairs: Pairs) -> Tensor:
        """The loss of each pair, [pairs]."""
        row = PREFERENCE_LOSSES[self.loss]
        return row.loss(pairs, self.beta, **row.values(self))


class DpoConfig(RunConfig):
    """Settings of a DPO run: `data.train_batch_size` counts pairs; of `actor.*` what concerns optimizer and memory."""

    data: DataConfig = DataConfig()
    actor: ActorConfig = ActorConfig()
    dpo: DpoSettings = DpoSettings()

    def for_workers(self) -> Config:
        """Settings of actor and reference: one optimizer step per batch, on the sum over each response's tokens."""
        actor = {
            "mini_batch_size": 2 * self.data.train_batch_size,
            "ppo_epochs": 1,
            "policy_loss": "ppo",
            "loss_aggregation": "seq-mean-token-sum",
            "kl_loss_coefficient": 0.0,
            "entropy_coefficient": 0.0,
        }
        return Config.model_validate(
            {
                "model": self.model,
                "trainer": self.trainer,
                "data": self.data,
                "actor": self.actor.model_copy(update=actor),
                "algorithm": {"advantage": "reinforce_plus_plus"},
                "rollout": {"samples_per_prompt": 2},
            }
        )


def train_on_preferences(settings: DpoConfig) -> Path:
    """Runs DPO on the Ray cluster at RAY_ADDRESS or on this machine; the run's directory. Raises TrainerError."""
    run_dir = run_directory(settings.trainer)
    with RunOwner(run_dir) as owner:
        return _train(settings, run_dir, owner)


def _train(settings: DpoConfig, run_dir: Path, owner: RunOwner) -> Path:
    config = with_local_models(with_last_checkpoint(settings.for_workers()))
    model, limit = config.model.directory, config.trainer.worker_timeout
    check_models(config)
    tokenizer = use_chat_template(load_tokenizer(config.model), config.data)
    data, seed = config.data, config.trainer.seed
    training = read_pairs(data.train_files, tokenizer, data, Subset.of_training(data, seed))
    validation = read_pairs(data.validation_files, tokenizer, data, Subset.of_validation(data, seed))
    resumed = read_checkpoint(config.trainer.checkpoint, model, ["actor"]) if config.trainer.checkpoint else None
    with (
        Tracker(run_dir, settings, recorded_step(settings.trainer, resumed), COLUMNS) as tracker,
        connected(),
        StopSignal(owner.check) as stop,
    ):
        with tracker.phase("start_up"):
            planned = find_plan(config, ["actor"] if config.actor_is_reference else ["actor", "reference"])
            config = planned.config
            groups = start_training(config, planned.placement)
            connect_ranks(groups.all, run_dir, steps_of(config, len(training)), limit)
            run = PreferenceRun(settings, config, run_dir, tracker, stop, groups, training, validation)
            tracker.expect(run.last_step)
            run.begin(resumed)
        run.run()
    return run_dir


class PreferenceRun(TrainingRun):
    """Takes DPO steps on batches of pairs."""

    def __init__(
        self,
        settings: DpoConfig,
        config: Config,
        run_dir: Path,
        tracker: Tracker,
        stop: StopSignal,
        groups: TrainingGroups,
        training: Sequence[PreferencePair],
        validation: Sequence[PreferencePair],
    ) -> None:
        self.dpo, self.config = settings.dpo, config
        self.actor = groups.actor
        self.reference: WorkerGroup[ReferenceRole] = groups.reference or groups.actor  # without its adapters
        self.training, self.validation = training, validation
        size = config.data.train_batch_size
        self.sampler = PromptSampler(len(training), size, config.data.shuffle, config.trainer.seed)
        super().__init__(config, run_dir, tracker, stop, groups, self.sampler, steps_of(config, len(training)))

    def step(self, _step: int) -> dict[str, float]:
        """One optimizer step on a batch of pairs; its metrics."""
        started = time.perf_counter()
        batch = self._forward(pair_batch([self.training[index] for index in self.sampler.next_batch()]))
        pairs = preference_pairs(batch.old_log_probs, batch.reference_log_probs, batch.response_mask)
        advantages, losses = preference_advantages(pairs, batch.response_mask, self.dpo.losses)
        self.begin_update()
        with self.tracker.phase("update_actor"):
            metrics = update(self.actor, batch.with_(advantages=advantages), len(batch))
        seconds = time.perf_counter() - started
        return {
            **metrics,
            "dpo/loss": losses.mean().item(),
            "dpo/margin": self.dpo.beta * pairs.margins.mean().item(),
            "dpo/accuracy": (pairs.margins > 0).float().mean().item(),
            "time/step": seconds,
            "throughput/tokens_per_second": int(batch.lengths.sum()) / seconds,
        }

    def validate(self) -> dict[str, float]:
        """The share of held-out pairs in which the policy prefers the chosen response more than the reference does.

        It is 0 while the policy equals the reference.
        """
        with self.tracker.phase("validate"):
            batch = self._forward(pair_batch(self._even(self.validation)))
            pairs = preference_pairs(batch.old_log_probs, batch.reference_log_probs, batch.response_mask)
            held_out = slice(len(self.validation))
        return {
            "validation/preference_accuracy": (pairs.margins[held_out] > 0).float().mean().item(),
            "validation/preference_loss": self.dpo.losses(pairs)[held_out].mean().item(),
        }

    def _forward(self, batch: Batch) -> Batch:
        with self.tracker.phase("old_log_prob"):
            batch = batch.with_(old_log_probs=forward(self.actor, ActorRole.log_probs, batch))
        with self.tracker.phase("reference"):
            return batch.with_(reference_log_probs=forward(self.reference, ReferenceRole.reference_log_probs, batch))

    def _even(self, pairs: Sequence[PreferencePair]) -> list[PreferencePair]:
        """The pairs, the last one repeated until every rank gets as many rows."""
        ranks = len(self.actor)
        return [*pairs, *[pairs[-1]] * (-len(pairs) % ranks)]


def steps_of(config: Config, pairs: int) -> int:
    """The steps of a run on this many pairs."""
    settings = config.trainer
    return settings.total_steps or max(1, settings.total_epochs * pairs // config.data.train_batch_size)


def pair_batch(pairs: Sequence[PreferencePair]) -> Batch:
    """Rows 2i and 2i + 1 are the chosen and the rejected response of pair i."""
    return Batch.from_responses(
        [pair.prompt for pair in pairs for _ in range(2)],
        [response for pair in pairs for response in (pair.chosen, pair.rejected)],
        None,
    )
