"""The critic, which estimates the value of each state."""

import torch
from torch import Tensor

from trainer.algorithms.aggregation import GlobalCount, aggregate, token_mean
from trainer.algorithms.value_loss import clipped_value_loss
from trainer.data.batch import Batch
from trainer.models.networks import ValueNetwork
from trainer.roles.worker import TrainingWorker, micro_batch_limit
from trainer.training.engine import TrainingEngine


class CriticWorker(TrainingWorker):
    def build(self) -> TrainingEngine:
        settings = self.config.critic
        language_model = self.language_model(settings.path or self.config.model.directory, settings)
        network = ValueNetwork(language_model, getattr(torch, settings.weights_dtype))
        optimizer = self.optimizer(settings)
        return TrainingEngine(network, self.execution(settings), optimizer)

    def values(self, batch: Batch) -> Tensor:
        """Values before each token of this rank's responses, [rows, response length]."""
        return self.engine.forward(batch, micro_batch_limit(self.config.critic))

    def update(self, batch: Batch) -> dict[str, float]:
        """All optimizer steps of a PPO step on this rank's rows, and their metrics."""
        return self.take_steps("critic", self.config.critic, batch, self.loss)

    def loss(self, values: Tensor, batch: Batch, count: GlobalCount) -> tuple[Tensor, dict[str, Tensor]]:
        settings, mask = self.config.critic, batch.response_mask
        losses = clipped_value_loss(values, batch.values, batch.returns, settings.clip_range_value)
        scale_length = settings.loss_scale_length or self.config.data.max_response_length
        loss = aggregate(losses, mask, settings.loss_aggregation, count, scale_length)
        return loss, {"value_loss": token_mean(losses, mask, count.tokens)}
