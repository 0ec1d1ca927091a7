"""The actor: the policy in training."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import ray
import torch
from ray import ObjectRef
from torch import Tensor
from torch.distributed import TCPStore

from trainer.algorithms.losses.aggregation import GlobalCount, aggregate
from trainer.algorithms.losses.distillation import distillation_policy_loss, teacher_kl
from trainer.algorithms.losses.kl import kl_loss
from trainer.algorithms.off_policy.importance import approximate_kl, geometric_mean
from trainer.algorithms.registry import POLICY_LOSSES
from trainer.cluster.place import RankPlace
from trainer.config.tree import Config
from trainer.data.batches.batch import Batch
from trainer.data.batches.copies import HostCopies
from trainer.models.export import write_language_model
from trainer.models.lora import adapters_off, keep_start, write_adapter
from trainer.models.networks import PolicyNetwork
from trainer.roles.worker import TrainingWorker
from trainer.training.engine import TrainingEngine
from trainer.training.memory.allocator import give_back_memory, shareable_memory
from trainer.training.ranks.process_group import open_store
from trainer.training.self_check import check_log_probs, check_rows, transformers_log_probs
from trainer.weights.buckets import BUCKETS_AT_ONCE, Bucket, BucketLayout, SharedPart, StoredBucket, pack, share, store
from trainer.weights.channel import WeightChannel


class ActorWorker(TrainingWorker):
    _sharing: Iterator[Bucket]
    _shared: Sequence[Bucket] = ()
    _packed: list[Bucket]
    _kept_layouts: Sequence[BucketLayout] = ()
    _channel: WeightChannel | None = None
    _channel_store: TCPStore | None = None

    def __init__(self, config: Config, place: RankPlace) -> None:
        super().__init__(config, place)
        self._packed = []
        self._kept = HostCopies()

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
        engine = TrainingEngine(network, self.execution(settings), self.optimizer(settings))
        check_log_probs(engine, rows, expected, model.model_type)
        return engine

    def log_probs(self, batch: Batch) -> Tensor:
        """Log-probs of this rank's responses, [rows, response length]."""
        return self.forward(batch)

    def squared_probabilities(self, batch: Batch) -> Tensor:
        """The sum of the squared probabilities over the vocabulary at each response token, [rows, response length]."""
        with self.engine.network.returning_squares():
            return self.log_probs(batch)

    def reference_log_probs(self, batch: Batch) -> Tensor:
        """Log-probs with the adapters that the run started from, without any if it started from none."""
        with adapters_off(self.engine.network):
            return self.log_probs(batch)

    def update(self, batch: Batch) -> dict[str, float]:
        """Takes all optimizer steps of a PPO step on this rank's rows; their metrics."""
        return self.take_steps(batch, self.loss)

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
        scale_length = settings.loss_scale_length or self.config.data.max_response_length
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
        algorithm = self.config.algorithm
        if algorithm.old_log_probs == "trainer":  # rejected before the update
            return batch.corrections, batch.response_mask
        corrected = algorithm.off_policy.apply(log_probs, batch.old_log_probs, batch.response_mask)
        return corrected.weights, corrected.accepted

    def publish_weights(self) -> tuple[list[ObjectRef], int]:
        """Puts the trained weights into Ray's object store. Every rank calls it; rank 0 returns the buckets and their
        size in bytes."""
        references, nbytes = [], 0
        for bucket in self._buckets():
            references.append(ray.put(store(bucket)))
            nbytes += bucket.layout.nbytes
        return references, nbytes

    def share_weights(self, begins: bool) -> SharedPart:
        """The first or the next of the trained weights, kept in each rank's GPU memory until the next call or
        `release_weights`. Every rank calls it until a part `ends`."""
        if begins:
            self._sharing = pack(self._learned(shared_once=True), self.dtype)
        self._shared = []
        give_back_memory()
        at_once = BUCKETS_AT_ONCE if self.config.loads_in_parts else None
        with shareable_memory(self.device):
            self._shared = list(islice(self._sharing, at_once))
        ends = at_once is None or len(self._shared) < at_once
        return SharedPart([share(bucket) for bucket in self._shared], ends)

    def release_weights(self) -> None:
        """Frees the last part of `share_weights` after the engines have copied it, or what `send_weights` has sent."""
        self._shared = []
        self.engine.release_memory()

    def open_channel(self, size: int) -> int:
        """Rank 0 only: opens the store of the process group for broadcasts; its port."""
        self._channel_store = open_store(self.place.address, size, self.config.trainer.worker_timeout)
        return int(self._channel_store.port)

    def join_channel(self, size: int) -> None:
        """Rank 0 only: joins that process group and waits for the engines."""
        if self._channel is not None:
            self._channel.close()
        timeout = self.config.trainer.worker_timeout / 2  # shorter than the caller's time limit
        self._channel = WeightChannel(self._channel_store, 0, size, self.device, timeout)

    def pack_weights(self) -> Sequence[BucketLayout]:
        """Packs the trained weights into buckets. Every rank calls it; rank 0 keeps the buckets and returns their
        layouts, which are the same each time."""
        deque(self._packing(), maxlen=0)
        return [bucket.layout for bucket in self._packed]

    def send_weights(self) -> None:
        """Rank 0 only: broadcasts the packed buckets to all engines and starts to copy them to CPU.

        An actor with one rank may skip `pack_weights`: it then sends each bucket while it packs the next.
        """
        assert self._channel is not None
        packing = iter(self._packed) if self._packed else self._packing()
        try:
            self._channel.send(packing)
        finally:
            deque(packing, maxlen=0)  # engines that the broadcast missed need all buckets later
            self._keep_packed()

    def publish_sent_weights(self) -> list[ObjectRef]:
        """Rank 0 only: puts the buckets of the last broadcast into the object store, whatever changed since."""
        self._keep_packed()
        kept = zip(self._kept_layouts, self._kept.take(), strict=True)
        return [ray.put(StoredBucket(layout, data.numpy())) for layout, data in kept]

    def _packing(self) -> Iterator[Bucket]:
        """The buckets to send, each of which is kept. Every rank must exhaust it."""
        self._packed = []
        for bucket in self._buckets():
            self._packed.append(bucket)
            yield bucket

    def _buckets(self) -> Iterator[Bucket]:
        """The trained weights in buckets on rank 0, nothing on other ranks. Every rank must exhaust it."""
        if self.place.rank == 0:
            yield from pack(self._to_send(), self.dtype)
        else:
            deque(self._to_send(), maxlen=0)

    def _to_send(self) -> Iterable[tuple[str, Tensor]]:
        # Engines on GPUs load in place. Engines on CPU need a shared weight under both of its names.
        return self._learned(shared_once=self.device.type == "cuda")

    def _keep_packed(self) -> None:
        if self._packed:
            self._kept.start([bucket.data for bucket in self._packed])
            self._kept_layouts = [bucket.layout for bucket in self._packed]
            self._packed = []

    def export(self, directory: Path) -> None:
        """Writes the policy in Hugging Face format, with its tokenizer; every rank calls it, rank 0 writes.

        Adapters are merged into the weights, and stand by themselves in the directory `adapter`.
        """
        language_model = self.engine.network.language_model
        weights = self._at_first_rank(self.engine.full_weights(language_model))
        adapter = self.engine.adapter_weights(language_model)
        if self.place.rank == 0:
            model = self.config.model.directory
            weights += [(name, buffer.cpu()) for name, buffer in self.engine.buffers(language_model)]
            write_language_model(model, weights, self.dtype, directory)
            if adapter:
                write_adapter(adapter, self.config.actor.lora, model, directory / "adapter")

    def _learned(self, shared_once: bool = False) -> Iterable[tuple[str, Tensor]]:
        """The weights that the engines get: the adapters if they apply these, else all weights with the adapters merged
        in. Every rank must exhaust it."""
        language_model = self.engine.network.language_model
        if self.config.engines_apply_adapters:
            return self.engine.adapter_weights(language_model)
        return self.engine.full_weights(language_model, shared_once, self.dtype)

    def _at_first_rank(self, weights: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """The weights on CPU on rank 0, an empty list on other ranks."""
        if self.place.rank == 0:
            return [(name, tensor.to(device="cpu", dtype=self.dtype)) for name, tensor in weights]
        deque(weights, maxlen=0)
        return []
