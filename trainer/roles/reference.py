"""The reference policy: the policy before training."""

from torch import Tensor

from trainer.data.batch import Batch
from trainer.models.networks import PolicyNetwork
from trainer.roles.worker import TrainingWorker, micro_batch_limit
from trainer.training.engine import TrainingEngine


class ReferenceWorker(TrainingWorker):
    def build(self) -> TrainingEngine:
        # These weights are never updated, so the compute precision is enough.
        settings = self.config.actor
        language_model = self.read_model(self.config.model.directory, self.dtype, settings)
        network = PolicyNetwork(language_model, self.config.rollout.temperature)
        sharding = settings.sharding.model_copy(update={"param_offload": self.config.reference.param_offload})
        return TrainingEngine(network, self.execution(settings.model_copy(update={"sharding": sharding})))

    def reference_log_probs(self, batch: Batch) -> Tensor:
        """Log-probs of this rank's responses, [rows, response length]."""
        return self.engine.forward(batch, micro_batch_limit(self.config.actor))
