"""The actor: the policy in training."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import cast

import ray
import torch
from torch import Tensor
from torch.distributed import TCPStore

from trainer.algorithms.losses.aggregation import GlobalCount, aggregate
from trainer.algorithms.losses.distillation import distillation_policy_loss, teacher_kl
from trainer.algorithms.losses.kl import kl_loss
from trainer.algorithms.off_policy.importance import approximate_kl, geometric_mean
from trainer.algorithms.registry import POLICY_LOSSES
from trainer.cluster.place import RankPlace
from trainer.config.tree import WorkersConfig
from trainer.data.batches.batch import Batch
from trainer.data.batches.routes import Choices, Routes
from trainer.models.export import write_language_model
from trainer.models.lora import adapters_off, keep_start, write_adapter
from trainer.models.names_in_files import View, as_in_files, views_in_files
from trainer.models.networks import PolicyNetwork
from trainer.models.pretrained import empty_language_model
from trainer.models.routers import RouterLosses
from trainer.roles.worker import TrainingWorker
from trainer.rollout.engine import choose_engine, engine_rows
from trainer.training.engine import TrainingEngine
from trainer.training.memory.allocator import give_back_memory, shareable_memory
from trainer.training.ranks.process_group import open_store
from trainer.training.self_check import check_log_probs, check_rows, transformers_log_probs
from trainer.weights.buckets import BUCKET_BYTES
from trainer.weights.sender import Sender
from trainer.weights.slices import in_slices


class ActorWorker(TrainingWorker, Sender):
    def __init__(self, config: WorkersConfig, place: RankPlace) -> None:
        TrainingWorker.__init__(self, config, place)
        Sender.__init__(self, config, place, self.device, self.dtype)

    def build(self) -> TrainingEngine:
        settings = self.config.actor
        language_model = self.language_model(self.config.model.directory, settings)
        if settings.lora.path is not None and self.config.needs_reference:
            keep_start(language_model)
        model, temperature = language_model.config, self.config.rollout.temperature
        rows = check_rows(model.get_text_config().vocab_size)
        first = self.place.rank == 0  # other ranks may have no weights yet
        expected = transformers_log_probs(language_model, rows, temperature) if first else None
        network = PolicyNetwork(language_model, temperature)
        network.routers.coefficients = RouterLosses(settings.router_aux_loss, settings.router_z_loss)
        engine = TrainingEngine(network, self.execution(settings), self.optimizer(settings))
        check_log_probs(engine, rows, expected, model.model_type)
        return engine

    def log_probs(self, batch: Batch) -> Tensor:
        """Log-probs of this rank's responses, [rows, response length]."""
        return self.forward(with_choices(batch))

    def log_probs_and_routes(self, batch: Batch) -> tuple[Tensor, Routes]:
        """The same, and the experts that tokens chose, which the first rank of a data group stores."""
        recorded: list[Routes] = []
        log_probs = self.in_micro_batches(batch, partial(self.engine.forward, batch, routes=recorded))
        first = self.place.rank % self.engine.ranks_per_data_group == 0
        return log_probs, recorded[-1].stored(ray.put) if first else Routes([])

    def squared_probabilities(self, batch: Batch) -> Tensor:
        """The sum of the squared probabilities over the vocabulary at each response token, [rows, response length]."""
        with self.engine.network.returning_squares():
            return self.log_probs(batch)

    def reference_log_probs(self, batch: Batch) -> Tensor:
        """Log-probs with the adapters that the run started from, without any if it started from none."""
        with adapters_off(self.engine.network):
            return self.log_probs(batch)

    def update(self, batch: Batch, mini_batches: Sequence[int]) -> dict[str, float]:
        """Takes all optimizer steps of a PPO step; their metrics. See `take_steps`."""
        return self.take_steps(with_choices(batch), mini_batches, self.loss)

    def loss(self, output: tuple[Tensor, Tensor], batch: Batch, count: GlobalCount) -> tuple[Tensor, dict[str, Tensor]]:
        """Policy loss, less the entropy bonus, plus the KL if it is a loss; metrics are means over the tokens."""
        settings, mask = self.config.actor, batch.response_mask
        log_probs, entropies = output
        # With a single optimizer step, the old log-probs are those of this pass.
        old_log_probs = log_probs.detach() if batch.old_log_probs is None else batch.old_log_probs
        row = POLICY_LOSSES[settings.policy_loss]
        weights, trained = self.corrections(log_probs, batch)
        policy = row.loss(log_probs, old_log_probs, batch.advantages, trained, **row.values(settings))
        policy_loss = policy.loss
        if weights is not None:
            policy_loss = policy_loss * (geometric_mean(weights, trained) if row.sequence_level else weights)
        losses = -settings.entropy_coefficient * entropies
        if batch.teacher_log_probs is not None:
            from_teacher, kl = self.teacher_loss(log_probs, old_log_probs, batch, weights)
            losses = losses + self.config.distillation.coefficient * from_teacher
            policy_loss = policy_loss if self.config.distillation.rewards else torch.zeros_like(policy_loss)
        metrics = {
            "policy_loss": policy_loss.where(trained, 0.0),
            "entropy": entropies,
            "clip_fraction": policy.clipped.to(policy_loss.dtype),
            "approximate_kl": approximate_kl(log_probs, old_log_probs),
        }
        if batch.teacher_log_probs is not None:
            metrics["teacher_kl"] = kl
        if settings.kl_loss_coefficient:
            kl = kl_loss(log_probs, batch.reference_log_probs, settings.kl_loss_estimator, settings.kl_loss_unbiased)
            losses = losses + settings.kl_loss_coefficient * kl
            metrics["kl_loss"] = kl
        scale_length = settings.loss_scale_length or self.config.longest_row[1]
        loss = aggregate(policy_loss, trained, row.aggregation or settings.loss_aggregation, count, scale_length)
        loss = loss + aggregate(losses, trained, settings.loss_aggregation, count, scale_length)
        return loss, {name: aggregate(value, mask, "token-mean", count) for name, value in metrics.items()}

    def teacher_loss(
        self, log_probs: Tensor, old_log_probs: Tensor, batch: Batch, weights: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The loss of each token that brings the policy closer to the teacher, and the KL to the teacher."""
        settings = self.config.distillation
        kl = teacher_kl(log_probs, batch.teacher_log_probs, settings.estimator, settings.limit)
        if settings.signal == "loss":
            return kl, kl
        loss = distillation_policy_loss(
            log_probs, old_log_probs, kl, batch.response_mask, settings.clip_ratio, settings.clip_dual
        )
        return (loss if weights is None else loss * weights), kl

    def corrections(self, log_probs: Tensor, batch: Batch) -> tuple[Tensor | None, Tensor]:
        """The weight of each token's policy loss, None if all are 1, and the tokens that train; both
        [rows, response length]."""
        correction = self.config.corrects_in_update
        if correction is None:  # rejected before the update
            return batch.corrections, batch.response_mask
        corrected = correction.apply(log_probs, batch.old_log_probs, batch.response_mask)
        return corrected.weights, corrected.accepted

    def trained_weights(self, shared_once: bool) -> Iterable[tuple[str, Tensor]]:
        """The adapters if the engines apply these, else all weights with the adapters merged in.

        Engines that load files get tensors of the model's files, those of many experts in slices.
        """
        language_model = self.engine.network.language_model
        if self.config.engines_apply_adapters:
            return self.engine.adapter_weights(language_model)
        weights = self.engine.full_weights(language_model, shared_once, self.dtype)
        if not self._engines_load_files:
            return weights
        return in_slices(as_in_files(weights, self._views), self.dtype, BUCKET_BYTES)

    def fixed_weights(self) -> Iterable[tuple[str, Tensor]]:
        if self.config.engines_apply_adapters:
            return []
        buffers = self.engine.buffers(self.engine.network.language_model)
        return as_in_files(buffers, self._views) if self._engines_load_files else buffers

    @cached_property
    def _engines_load_files(self) -> bool:
        return engine_rows()[choose_engine(self.config.rollout.engine)[0]].loads_files

    @cached_property
    def _views(self) -> Mapping[str, Sequence[View]] | None:
        model = empty_language_model(self.config.model.directory)
        return views_in_files(model, {name: tensor.shape for name, tensor in model.state_dict().items()})

    def memory_to_share(self) -> AbstractContextManager[None]:
        give_back_memory()
        return shareable_memory(self.device)

    def release_memory(self) -> None:
        self.engine.release_memory()

    def store_for(self, size: int) -> TCPStore:
        return open_store(self.place.address, size, self.config.trainer.worker_timeout)

    def export(self, directory: Path) -> None:
        """Writes the policy in Hugging Face format, with its tokenizer; every rank calls it and writes its share.

        Adapters are merged into the weights, and stand by themselves in the directory `adapter`.
        """
        language_model, model = self.engine.network.language_model, self.config.model.directory
        weights = self.engine.full_weights(language_model, shared_once=True, dtype=self.dtype)
        with_buffers = chain(weights, self.engine.buffers(language_model))
        place = self.place
        write_language_model(model, with_buffers, self.dtype, directory, rank=place.rank, ranks=place.world_size)
        adapter = self.engine.adapter_weights(language_model)
        if place.rank == 0 and adapter:
            write_adapter(adapter, self.config.actor.lora, model, directory / "adapter")


def with_choices(batch: Batch) -> Batch:
    """The batch with its recorded experts in memory, without those that were lost with the process that stored them."""
    return batch if batch.routes is None else batch.with_(routes=batch.routes.fetched(_in_store))


def _in_store(references: list[ray.ObjectRef]) -> list[Choices | None]:
    try:
        return list(ray.get(references))
    except ray.exceptions.ObjectLostError:  # a process that died owned some of them
        return [_lost_or_kept(reference) for reference in references]


def _lost_or_kept(reference: ray.ObjectRef) -> Choices | None:
    try:
        return cast(Choices, ray.get(reference))
    except ray.exceptions.ObjectLostError:
        return None
