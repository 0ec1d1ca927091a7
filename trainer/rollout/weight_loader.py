"""What the trainer adds to the worker inside vLLM."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights

from trainer.models.lora import named_adapters
from trainer.weights.arrival import check_in_place, checked
from trainer.weights.buckets import SentBucket, checksum
from trainer.weights.in_place import InPlaceLoader

# By this number requests ask for the actor's adapters, of which there is one set.
ADAPTERS = 1


class WeightLoader:
    """Mixed into vLLM's worker as its `worker_extension_cls`."""

    model_runner: Any
    _in_place: InPlaceLoader | None = None

    def replace_weights(self, buckets: Iterable[SentBucket]) -> None:
        """Puts all weights in the place of the old ones. Raises WorkerError if they do not arrive as they were sent.

        `reload_weights` undoes and repeats what the engine did to its weights after loading (on CPU, oneDNN's
        prepacking); `model.load_weights` would not. It begins when all buckets are there: one that breaks off half-way
        leaves layers that no other can complete.
        """
        arrived = list(buckets)
        for sent in arrived:
            checked(sent)
        self._in_place = None  # its weights may be others from now on
        self.model_runner.reload_weights(
            weights_iterator=(weight for sent in arrived for weight in sent.open().tensors())
        )

    def copy_weights(self, buckets: Iterable[SentBucket]) -> None:
        """The same from the memory of the GPU, straight into the model's own weights, which are summed up afterwards.

        Raises WorkerError if one of them is not what was sent.
        """
        self._in_place = self._in_place or InPlaceLoader(self.model_runner.get_model())
        self._in_place.load(buckets)

    def replace_adapters(self, buckets: Iterable[SentBucket], scaling: float) -> None:
        """Puts adapters in the place of the old ones, wherever they are. Raises WorkerError if they do not arrive as
        they were sent.

        `scaling` is what they add is multiplied by.
        """
        arrived = [checked(sent) for sent in buckets]
        self._activate({name: tensor.cpu() for bucket in arrived for name, tensor in bucket.tensors()}, scaling)

    def _activate(self, tensors: dict[str, Tensor], scaling: float) -> None:
        manager = self.model_runner.lora_manager._adapter_manager
        # Scaled here, so that what the kernels read is what can be summed up: vLLM has nothing to multiply any more.
        layers = {name: (a.cpu(), b.cpu() * scaling) for name, (a, b) in named_adapters(tensors).items()}
        adapters = {name: LoRALayerWeights(name, len(a), len(a), a, b) for name, (a, b) in layers.items()}
        manager.remove_adapter(ADAPTERS)
        manager.add_adapter(LoRAModel(ADAPTERS, next(iter(adapters.values())).rank, adapters))
        manager.activate_adapter(ADAPTERS)
        inside = [part for layer in manager.modules.values() for part in (*layer.lora_a_stacked, *layer.lora_b_stacked)]
        check_in_place(checksum(inside), checksum(part for layer in layers.values() for part in layer))
