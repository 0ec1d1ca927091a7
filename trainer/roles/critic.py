"""The critic, which estimates the value of each state."""

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.algorithms.losses.aggregation import GlobalCount, aggregate
from trainer.algorithms.losses.value_loss import clipped_value_loss
from trainer.data.batches.batch import Batch
from trainer.models.networks import ValueNetwork
from trainer.roles.worker import TrainingWorker
from trainer.training.engine import TrainingEngine
from trainer.training.self_check import check_head, check_rows, check_values, transformers_values


class CriticWorker(TrainingWorker):
    section = "critic"
    needs_head = False

    def build(self) -> TrainingEngine:
        settings = self.config.critic
        language_model = self.language_model(settings.path or self.config.model.directory, settings)
        model, weights_dtype = language_model.config.get_text_config(), getattr(torch, settings.weights_dtype)
        rows, head = check_rows(model.vocab_size), check_head(model.hidden_size).to(weights_dtype)
        first = self.place.rank == 0  # other ranks may have no weights yet
        expected = transformers_values(language_model, head, rows) if first else None
        network = ValueNetwork(language_model, weights_dtype)
        network.head.weight.data.copy_(head)
        engine = TrainingEngine(network, self.execution(settings), self.optimizer(settings))
        check_values(engine, rows, expected, language_model.config.model_type)
        with engine.stepping(), torch.no_grad():
            # Training starts from a head of zeros: the first advantages come from the rewards, not from a random head.
            engine.network.head.weight.zero_()
        return engine

    def values(self, batch: Batch) -> Tensor:
        """Values before each token of this rank's responses, [rows, response length]."""
        return self.forward(batch)

    def update(self, batch: Batch, mini_batches: Sequence[int]) -> dict[str, float]:
        """Takes all optimizer steps of a PPO step; their metrics. See `take_steps`."""
        return self.take_steps(batch, mini_batches, self.loss)

    def loss(self, values: Tensor, batch: Batch, count: GlobalCount) -> tuple[Tensor, dict[str, Tensor]]:
        settings, mask = self.config.critic, batch.response_mask
        losses = clipped_value_loss(values, batch.values, batch.returns, settings.clip_range_value)
        scale_length = settings.loss_scale_length or self.config.data.max_response_length
        loss = aggregate(losses, mask, settings.loss_aggregation, count, scale_length)
        return loss, {"value_loss": aggregate(losses, mask, "token-mean", count)}
