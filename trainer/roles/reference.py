"""Policies that are not trained: the reference, which is the policy before training, and a teacher."""

from pathlib import Path

from torch import Tensor

from trainer.data.batches.batch import Batch
from trainer.models.networks import PolicyNetwork
from trainer.roles.worker import TrainingWorker
from trainer.training.engine import TrainingEngine


class ReferenceWorker(TrainingWorker):
    @property
    def directory(self) -> Path:
        """Where the model is."""
        return self.config.model.directory

    def build(self) -> TrainingEngine:
        # These weights are never updated, so the compute precision is enough.
        settings = self.config.actor
        language_model = self.read_model(self.directory, self.dtype, settings)
        network = PolicyNetwork(language_model, self.config.rollout.temperature)
        sharding = settings.sharding.model_copy(update={"param_offload": self.config.reference.param_offload})
        return TrainingEngine(network, self.execution(settings.model_copy(update={"sharding": sharding})))

    def reference_log_probs(self, batch: Batch) -> Tensor:
        """Log-probs of this rank's responses, [rows, response length]."""
        return self.forward(batch)


class TeacherWorker(ReferenceWorker):
    """A teacher, placed and sharded like a reference."""

    @property
    def directory(self) -> Path:
        assert self.config.distillation.teacher is not None
        return self.config.distillation.teacher
