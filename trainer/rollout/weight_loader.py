"""What the trainer adds to the worker inside vLLM."""

from collections.abc import Sequence
from typing import Any

import torch

from trainer.rollout.arrival import TravelledBucket, check_bytes, check_copied
from trainer.training.weights import SharedBucket


class WeightLoader:
    """Mixed into vLLM's worker as its `worker_extension_cls`."""

    model_runner: Any

    def replace_weights(self, buckets: Sequence[TravelledBucket]) -> None:
        """Puts all weights in the place of the old ones. Raises EngineError if they do not arrive as they were sent.

        `reload_weights` undoes and repeats what the engine did to its weights after loading (on CPU, oneDNN's
        prepacking); `model.load_weights` would not.
        """
        check_bytes(buckets)
        self.model_runner.reload_weights(weights_iterator=(weight for bucket in buckets for weight in bucket.tensors()))

    def copy_weights(self, buckets: Sequence[SharedBucket]) -> None:
        """The same from the memory of the GPU, straight into the model's own weights, which are summed up afterwards.

        Raises EngineError if one of them is not what was sent.
        """
        model = self.model_runner.get_model()
        for bucket in buckets:
            model.load_weights(bucket.tensors())
        # The sender may free its memory as soon as this returns; the sum waits for the copies.
        check_copied(model.parameters(), buckets)
        torch.cuda.ipc_collect()
