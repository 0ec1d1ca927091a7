"""What the trainer adds to the worker inside vLLM."""

from collections.abc import Sequence
from typing import Any

from trainer.training.weights import WeightBucket


class WeightLoader:
    """Mixed into vLLM's worker as its `worker_extension_cls`."""

    model_runner: Any

    def replace_weights(self, buckets: Sequence[WeightBucket]) -> None:
        """Puts all weights in the place of the old ones.

        `reload_weights` undoes and repeats what the engine did to its weights after loading (on CPU, oneDNN's
        prepacking); `model.load_weights` would not.
        """
        self.model_runner.reload_weights(weights_iterator=(weight for bucket in buckets for weight in bucket.tensors()))
